#include "torch/cuda/host_codes.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "torch/cuda/codes.h"
#include "torch/cuda/elements.h"

// Blocks are worked on one after the other, and stay in the nearest cache: a value is read once
// from memory and its residual read and written once. Loops are for vectors (vector_loops.h);
// blocks with values that are not finite take a slower one.

namespace hvd_order {

namespace {

using Exact = std::array<float, kBlock>;

template <typename Element>
struct Block {
  typename Element::Stored* __restrict values;
  float* __restrict residual; ///< null: none
  std::int64_t count;
};

/// Values and residuals of a block, added; returns the largest magnitude as bits.
template <typename Element>
HVDO_INLINE inline std::uint32_t exactOf(const Block<Element>& block, float* __restrict exact) {
  if (block.residual == nullptr) {
    for (std::int64_t i = 0; i < block.count; ++i) {
      exact[i] = static_cast<float>(Element::widen(block.values[i]));
    }
  } else {
    for (std::int64_t i = 0; i < block.count; ++i) {
      exact[i] = static_cast<float>(Element::widen(block.values[i])) + block.residual[i];
    }
  }
  std::int32_t largest = 0; // no sign bit: signed numbers compare as fast as any
  for (std::int64_t i = 0; i < block.count; ++i) {
    largest = std::max(largest, static_cast<std::int32_t>(codes::magnitude(exact[i])));
  }
  return static_cast<std::uint32_t>(largest);
}

template <typename Element, bool kWritesBack>
void encodeSpecial(
    const Block<Element>& block,
    const Exact& exact,
    float* scale,
    std::int8_t* codes) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < block.count; ++i) {
    const std::uint32_t bits = codes::magnitude(exact[static_cast<std::size_t>(i)]);
    largest = bits < float_bits::kInfinity ? std::max(largest, bits) : largest;
  }
  const codes::Rounding rounding = codes::roundingOf(std::bit_cast<float>(largest), true);
  *scale = rounding.scale;
  for (std::int64_t i = 0; i < block.count; ++i) {
    const float each = exact[static_cast<std::size_t>(i)];
    const codes::Rounded rounded = codes::roundedInSpecial(each, rounding);
    codes[i] = static_cast<std::int8_t>(rounded.code);
    if (block.residual != nullptr) {
      block.residual[i] = codes::lacking(each, rounded.value);
    }
    if constexpr (kWritesBack) {
      block.values[i] = Element::round(rounded.value);
    }
  }
}

template <typename Element, bool kWritesBack>
HVDO_INLINE inline void
encodeBlock(const Block<Element>& block, float* scale, std::int8_t* __restrict codes) {
  alignas(64) Exact exact;
  const std::uint32_t largest = exactOf(block, exact.data());
  if (largest >= float_bits::kInfinity) {
    encodeSpecial<Element, kWritesBack>(block, exact, scale, codes);
    return;
  }
  const codes::Rounding rounding = codes::roundingOf(std::bit_cast<float>(largest), false);
  *scale = rounding.scale;
  float* __restrict received = exact.data();
  if (block.residual == nullptr) {
    for (std::int64_t i = 0; i < block.count; ++i) {
      const codes::Rounded rounded = codes::rounded(received[i], rounding);
      codes[i] = static_cast<std::int8_t>(rounded.code);
      received[i] = rounded.value;
    }
  } else {
    for (std::int64_t i = 0; i < block.count; ++i) {
      const codes::Rounded rounded = codes::rounded(received[i], rounding);
      codes[i] = static_cast<std::int8_t>(rounded.code);
      block.residual[i] = received[i] - rounded.value;
      received[i] = rounded.value;
    }
  }
  if constexpr (kWritesBack) {
    for (std::int64_t i = 0; i < block.count; ++i) {
      block.values[i] = Element::round(received[i]);
    }
  }
}

template <typename Element, bool kWritesBack>
void encodeInt8(const CodedRun& run) {
  auto* const values = static_cast<typename Element::Stored*>(run.values);
  auto* const codes = static_cast<std::int8_t*>(run.codes);
  runOnWidestVectors([=]() HVDO_INLINE {
    for (std::int64_t begin = 0; begin < run.count; begin += kBlock) {
      encodeBlock<Element, kWritesBack>(
          {values + begin, run.residual == nullptr ? nullptr : run.residual + begin,
           std::min(kBlock, run.count - begin)},
          run.scales + begin / kBlock, codes + begin);
    }
  });
}

template <typename Element, typename Wire, bool kWritesBack>
void encodeNarrow(const CodedRun& run) {
  auto* const __restrict values = static_cast<typename Element::Stored*>(run.values);
  auto* const __restrict codes = static_cast<typename Wire::Stored*>(run.codes);
  float* const __restrict residual = run.residual;
  runOnWidestVectors([=]() HVDO_INLINE {
    for (std::int64_t i = 0; i < run.count; ++i) {
      const float value = Element::widen(values[i]);
      float lost = residual == nullptr ? 0.0F : residual[i];
      codes[i] = withFeedback<Wire>(value, lost);
      if (residual != nullptr) {
        residual[i] = lost;
      }
      if constexpr (kWritesBack) {
        values[i] = Element::round(Wire::widen(codes[i]));
      }
    }
  });
}

template <typename Element>
void encodeExact(const CodedRun& run) {
  std::memcpy(
      run.codes, run.values,
      static_cast<std::size_t>(run.count) * sizeof(typename Element::Stored));
}

template <typename Element, bool kWritesBack>
void encodeAs(const CodedRun& run) {
  switch (run.format) {
    case WireFormat::kExact:
      return encodeExact<Element>(run);
    case WireFormat::kInt8:
      return encodeInt8<Element, kWritesBack>(run);
    case WireFormat::kBfloat16:
      return encodeNarrow<Element, Bfloat16, kWritesBack>(run);
    case WireFormat::kFloat16:
      return encodeNarrow<Element, Float16, kWritesBack>(run);
  }
}

template <typename Element, typename Wire, bool kFirst>
HVDO_INLINE inline void
addStored(const void* from, std::int64_t count, typename Element::Sum* __restrict sums) {
  const auto* const __restrict stored = static_cast<const typename Wire::Stored*>(from);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<typename Element::Sum>(Wire::widen(stored[i]));
    sums[i] = kFirst ? value : sums[i] + value;
  }
}

template <bool kFirst>
void addSpecial(const std::int8_t* codes, float scale, std::int64_t count, float* sums) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = codes::decodedInSpecial(codes[i], scale);
    sums[i] = kFirst ? value : sums[i] + value;
  }
}

template <bool kFirst>
HVDO_INLINE inline void addCodes(
    const std::int8_t* __restrict codes,
    float scale,
    std::int64_t count,
    float* __restrict sums) {
  if (codes::isSpecial(scale)) {
    addSpecial<kFirst>(codes, scale, count, sums);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = codes::decoded(codes[i], scale);
    sums[i] = kFirst ? value : sums[i] + value;
  }
}

/// One block of what a sender has sent.
template <typename Element, bool kFirst>
HVDO_INLINE inline void addMessage(
    const CodedRun& run,
    std::int64_t offset,
    std::int64_t begin,
    std::int64_t count,
    typename Element::Sum* sums) {
  const std::byte* const codes = static_cast<const std::byte*>(run.codes) + offset;
  if constexpr (sizeof(typename Element::Sum) == sizeof(float)) {
    switch (run.format) {
      case WireFormat::kInt8: {
        float scale = 0.0F;
        std::memcpy(
            &scale, reinterpret_cast<const std::byte*>(run.scales + begin / kBlock) + offset,
            sizeof scale);
        return addCodes<kFirst>(
            reinterpret_cast<const std::int8_t*>(codes) + begin, scale, count, sums);
      }
      case WireFormat::kBfloat16:
        return addStored<Element, Bfloat16, kFirst>(codes + 2 * begin, count, sums);
      case WireFormat::kFloat16:
        return addStored<Element, Float16, kFirst>(codes + 2 * begin, count, sums);
      case WireFormat::kExact:
        break;
    }
  }
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(typename Element::Stored));
  addStored<Element, Element, kFirst>(codes + kBytes * begin, count, sums);
}

template <typename Element>
void decodeAs(const CodedRun& run, Senders senders) {
  auto* const values = static_cast<typename Element::Stored*>(run.values);
  runOnWidestVectors([=]() HVDO_INLINE {
    alignas(64) std::array<typename Element::Sum, kBlock> sums;
    for (std::int64_t begin = 0; begin < run.count; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, run.count - begin);
      std::int64_t offset = 0;
      for (std::int32_t sender = 0; sender < senders.count; ++sender) {
        if (sender == senders.own) {
          sender == 0 ? addStored<Element, Element, true>(values + begin, count, sums.data())
                      : addStored<Element, Element, false>(values + begin, count, sums.data());
          continue;
        }
        sender == 0 ? addMessage<Element, true>(run, offset, begin, count, sums.data())
                    : addMessage<Element, false>(run, offset, begin, count, sums.data());
        offset += senders.stride;
      }
      for (std::int64_t i = 0; i < count; ++i) {
        values[begin + i] = Element::round(sums[static_cast<std::size_t>(i)]);
      }
    }
  });
}

} // namespace

void encodeOnHost(const CodedRun& run, ElementType element, bool writesBack) {
  switch (element) {
    case ElementType::kFloat32:
      return writesBack ? encodeAs<Float32, true>(run) : encodeAs<Float32, false>(run);
    case ElementType::kBfloat16:
      return writesBack ? encodeAs<Bfloat16, true>(run) : encodeAs<Bfloat16, false>(run);
    case ElementType::kFloat16:
      return writesBack ? encodeAs<Float16, true>(run) : encodeAs<Float16, false>(run);
    case ElementType::kFloat64:
      return encodeExact<Plain<double>>(run);
  }
}

void decodeOnHost(const CodedRun& run, ElementType element, Senders senders) {
  switch (element) {
    case ElementType::kFloat32:
      return decodeAs<Float32>(run, senders);
    case ElementType::kBfloat16:
      return decodeAs<Bfloat16>(run, senders);
    case ElementType::kFloat16:
      return decodeAs<Float16>(run, senders);
    case ElementType::kFloat64:
      return decodeAs<Plain<double>>(run, senders);
  }
}

} // namespace hvd_order
