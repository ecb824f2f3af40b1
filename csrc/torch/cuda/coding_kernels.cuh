#pragma once

#include <cuda_runtime.h>

#include "torch/cuda/codes.h"
#include "torch/cuda/elements.h"
#include "torch/cuda/kernel_table.h"

// `KernelTable::encode` and `decode`. A warp works on one block of codes.h, so the largest
// magnitude is found without a barrier; neighbouring threads take neighbouring elements.
namespace hvd_order {

namespace coding {

constexpr int kWarp = 32;
constexpr int kWarps = 8; // of a block of threads
constexpr int kMine = kBlock / kWarp;
constexpr int kFewRuns = 32;
constexpr int kManyRuns = 560; // 56 bytes each; an argument has at most 32,764

struct RunEntry {
  CodedRun run;
  std::int64_t firstBlock; // number of the blocks of the runs before
};

template <int kCapacity>
struct Runs {
  RunEntry runs[kCapacity];
  std::int64_t blocks;
  std::int32_t count;
};

/// The part of a run that a warp works on.
struct Part {
  CodedRun run;
  std::int64_t begin;
  int count;
};

template <int kCapacity>
__device__ Part partOf(const Runs<kCapacity>& table, std::int64_t block) {
  int low = 0; // the last run whose first block is not behind `block`
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.runs[middle].firstBlock <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const RunEntry& found = table.runs[low];
  const std::int64_t begin = (block - found.firstBlock) * kBlock;
  return {found.run, begin, static_cast<int>(min(kBlock, found.run.count - begin))};
}

/// Calls each(place in the run, place among this thread's elements).
template <typename Each>
__device__ void forMine(const Part& part, Each each) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int place = i * kWarp + lane;
    if (place < part.count) {
      each(part.begin + place, i);
    }
  }
}

template <typename Element, bool kWritesBack>
__device__ void encodeInt8(const Part& part) {
  auto* const values = static_cast<typename Element::Stored*>(part.run.values);
  auto* const out = static_cast<std::int8_t*>(part.run.codes);
  float* const residual = part.run.residual;
  float exact[kMine] = {};
  std::uint32_t largest = 0;
  std::uint32_t largestFinite = 0;
  forMine(part, [&](std::int64_t at, int i) {
    exact[i] = Element::widen(values[at]);
    if (residual != nullptr) {
      exact[i] += residual[at];
    }
    const std::uint32_t bits = codes::magnitude(exact[i]);
    largest = max(largest, bits);
    largestFinite = bits < float_bits::kInfinity ? max(largestFinite, bits) : largestFinite;
  });
  largest = __reduce_max_sync(0xffffffffU, largest);
  largestFinite = __reduce_max_sync(0xffffffffU, largestFinite);
  const bool special = largest >= float_bits::kInfinity;
  const codes::Rounding rounding = codes::roundingOf(std::bit_cast<float>(largestFinite), special);
  if (threadIdx.x % kWarp == 0) {
    part.run.scales[part.begin / kBlock] = rounding.scale;
  }
  forMine(part, [&](std::int64_t at, int i) {
    const codes::Rounded rounded =
        special ? codes::roundedInSpecial(exact[i], rounding) : codes::rounded(exact[i], rounding);
    out[at] = static_cast<std::int8_t>(rounded.code);
    if (residual != nullptr) {
      residual[at] = codes::lacking(exact[i], rounded.value);
    }
    if constexpr (kWritesBack) {
      values[at] = Element::round(rounded.value);
    }
  });
}

template <typename Element, typename Wire, bool kWritesBack>
__device__ void encodeNarrow(const Part& part) {
  auto* const values = static_cast<typename Element::Stored*>(part.run.values);
  auto* const out = static_cast<typename Wire::Stored*>(part.run.codes);
  forMine(part, [&](std::int64_t at, int) {
    float lost = part.run.residual == nullptr ? 0.0F : part.run.residual[at];
    out[at] = withFeedback<Wire>(Element::widen(values[at]), lost);
    if (part.run.residual != nullptr) {
      part.run.residual[at] = lost;
    }
    if constexpr (kWritesBack) {
      values[at] = Element::round(Wire::widen(out[at]));
    }
  });
}

template <typename Element, bool kWritesBack, int kCapacity>
__global__ void __launch_bounds__(kWarps* kWarp)
    encodeKernel(const __grid_constant__ Runs<kCapacity> table) {
  const std::int64_t block = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (block >= table.blocks) {
    return;
  }
  const Part part = partOf(table, block);
  if constexpr (sizeof(typename Element::Sum) == sizeof(float)) {
    switch (part.run.format) {
      case WireFormat::kInt8:
        return encodeInt8<Element, kWritesBack>(part);
      case WireFormat::kBfloat16:
        return encodeNarrow<Element, Bfloat16, kWritesBack>(part);
      case WireFormat::kFloat16:
        return encodeNarrow<Element, Float16, kWritesBack>(part);
      case WireFormat::kExact:
        break;
    }
  }
  const auto* const values = static_cast<const typename Element::Stored*>(part.run.values);
  auto* const out = static_cast<typename Element::Stored*>(part.run.codes);
  forMine(part, [&](std::int64_t at, int) { out[at] = values[at]; });
}

/// One element of a message.
template <typename Element>
__device__ typename Element::Sum
received(const CodedRun& run, std::int64_t offset, std::int64_t at) {
  const auto* const message = static_cast<const char*>(run.codes) + offset;
  if constexpr (sizeof(typename Element::Sum) == sizeof(float)) {
    switch (run.format) {
      case WireFormat::kInt8: {
        const auto* const scales =
            reinterpret_cast<const float*>(reinterpret_cast<const char*>(run.scales) + offset);
        const float scale = scales[at / kBlock];
        const std::int32_t code = reinterpret_cast<const std::int8_t*>(message)[at];
        return codes::isSpecial(scale) ? codes::decodedInSpecial(code, scale)
                                       : codes::decoded(code, scale);
      }
      case WireFormat::kBfloat16:
        return Bfloat16::widen(reinterpret_cast<const std::uint16_t*>(message)[at]);
      case WireFormat::kFloat16:
        return Float16::widen(reinterpret_cast<const std::uint16_t*>(message)[at]);
      case WireFormat::kExact:
        break;
    }
  }
  return Element::widen(reinterpret_cast<const typename Element::Stored*>(message)[at]);
}

template <typename Element, int kCapacity>
__global__ void __launch_bounds__(kWarps* kWarp)
    decodeKernel(const __grid_constant__ Runs<kCapacity> table, Senders senders) {
  const std::int64_t block = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (block >= table.blocks) {
    return;
  }
  const Part part = partOf(table, block);
  auto* const values = static_cast<typename Element::Stored*>(part.run.values);
  forMine(part, [&](std::int64_t at, int) {
    typename Element::Sum sum = 0;
    std::int64_t offset = 0;
    for (std::int32_t sender = 0; sender < senders.count; ++sender) {
      typename Element::Sum value;
      if (sender == senders.own) {
        value = Element::widen(values[at]);
      } else {
        value = received<Element>(part.run, offset, at);
        offset += senders.stride;
      }
      sum = sender == 0 ? value : sum + value;
    }
    values[at] = Element::round(sum);
  });
}

/// Calls launch(table, number of thread blocks) for tables of up to kCapacity runs.
template <int kCapacity, typename Launch>
const char* inTables(const CodedRun* runs, std::size_t count, const Launch& launch) {
  std::size_t next = 0;
  while (next < count) {
    Runs<kCapacity> table{};
    for (; next < count && table.count < kCapacity; ++next) {
      if (runs[next].count > 0) {
        table.runs[table.count++] = {runs[next], table.blocks};
        table.blocks += (runs[next].count + kBlock - 1) / kBlock;
      }
    }
    const std::int64_t threadBlocks = (table.blocks + kWarps - 1) / kWarps;
    if (threadBlocks > INT32_MAX) {
      return "more than 4 * 10^12 elements in one launch";
    }
    if (threadBlocks > 0) {
      launch(table, static_cast<unsigned>(threadBlocks));
    }
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename Launch>
const char* inTables(const CodedRun* runs, std::size_t count, const Launch& launch) {
  return count <= kFewRuns ? inTables<kFewRuns>(runs, count, launch)
                           : inTables<kManyRuns>(runs, count, launch);
}

/// Calls launch(Element{}) with the format of elements.
template <typename Launch>
const char* withElement(ElementType element, const Launch& launch) {
  switch (element) {
    case ElementType::kFloat32:
      return launch(Float32{});
    case ElementType::kBfloat16:
      return launch(Bfloat16{});
    case ElementType::kFloat16:
      return launch(Float16{});
    case ElementType::kFloat64:
      return launch(Plain<double>{});
  }
  return "no kernel for these elements";
}

inline const char* encode(
    const CodedRun* runs,
    std::size_t count,
    ElementType element,
    bool writesBack,
    void* stream) {
  return withElement(element, [&](auto format) {
    using Element = decltype(format);
    return inTables(runs, count, [&](const auto& table, unsigned threadBlocks) {
      auto* const on = static_cast<cudaStream_t>(stream);
      if (writesBack) {
        encodeKernel<Element, true><<<threadBlocks, kWarps * kWarp, 0, on>>>(table);
      } else {
        encodeKernel<Element, false><<<threadBlocks, kWarps * kWarp, 0, on>>>(table);
      }
    });
  });
}

inline const char* decode(
    const CodedRun* runs,
    std::size_t count,
    ElementType element,
    Senders senders,
    void* stream) {
  return withElement(element, [&](auto format) {
    using Element = decltype(format);
    return inTables(runs, count, [&](const auto& table, unsigned threadBlocks) {
      decodeKernel<Element>
          <<<threadBlocks, kWarps * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(table, senders);
    });
  });
}

} // namespace coding

} // namespace hvd_order
