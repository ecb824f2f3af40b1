#include "server/arithmetic/element_sum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "server/arithmetic/vector_loops.h"

namespace hvd_order {

namespace {

// An element type defines how elements are stored, the type in which they are added, and the
// conversions between both.
template <typename Number>
struct Plain {
  using Stored = Number;
  using Sum = Number;
  HVDO_INLINE static Sum widen(Stored stored) {
    return stored;
  }
  HVDO_INLINE static Stored round(Sum sum) {
    return sum;
  }
};

// A choice without a branch. Conditions on floats become branches otherwise, because comparing
// floats might trap.
HVDO_INLINE inline std::uint32_t choose(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = -std::uint32_t{condition};
  return (yes & mask) | (no & ~mask);
}

// Compares as signed numbers, which SSE2 can do on vectors; neither argument has the highest bit
// set.
HVDO_INLINE inline bool below(std::uint32_t left, std::uint32_t right) {
  return static_cast<std::int32_t>(left) < static_cast<std::int32_t>(right);
}

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFU; // of a float32: all bits but the sign
constexpr std::uint32_t kInfinity = 0x7F800000U;

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Sum = float;
  HVDO_INLINE static float widen(std::uint16_t stored) {
    return std::bit_cast<float>(std::uint32_t{stored} << 16U);
  }
  HVDO_INLINE static std::uint16_t round(float sum) {
    const auto bits = std::bit_cast<std::uint32_t>(sum);
    // Adds just less than half of the last place, plus the last bit: a tie rounds up if that bit
    // is odd.
    const std::uint32_t nearest = (bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U;
    const std::uint32_t quietNan = bits >> 16U | 0x40U;
    return static_cast<std::uint16_t>(
        choose(below(kInfinity, bits & kMagnitude), quietNan, nearest));
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static constexpr std::uint32_t kSign = 0x8000U;
  static constexpr std::uint32_t kExponentStep = 1U << 23U; // one up, in a float32
  static constexpr std::uint32_t kRebias = (127U - 15U) * kExponentStep;
  static constexpr std::uint32_t kSmallestNormal = kRebias + kExponentStep; // 2^-14
  static constexpr std::uint32_t kTooLarge = kRebias + 31U * kExponentStep; // 2^16
  // 0.5: its last bit has the value 2^-24, as has the last bit of a subnormal float16.
  static constexpr std::uint32_t kHalf = 0x3F000000U;

  HVDO_INLINE static float widen(std::uint16_t stored) {
    const std::uint32_t sign = (stored & kSign) << 16U;
    const std::uint32_t magnitude = (stored & ~kSign) << 13U;
    // (1.fraction - 1) times 2^-14. Exact, and no intermediate float32 is subnormal.
    const auto subnormal = std::bit_cast<std::uint32_t>(
        std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal));
    const std::uint32_t finite =
        choose(below(magnitude, kExponentStep), subnormal, magnitude + kRebias);
    const std::uint32_t special = magnitude | kInfinity;
    return std::bit_cast<float>(
        sign | choose(below(magnitude, 31U * kExponentStep), finite, special));
  }

  HVDO_INLINE static std::uint16_t round(float sum) {
    const auto bits = std::bit_cast<std::uint32_t>(sum);
    const std::uint32_t sign = bits >> 16U & kSign;
    const std::uint32_t magnitude = bits & kMagnitude;
    // Same as for Bfloat16. A carry out of the fraction raises the exponent, up to infinity, as it
    // should.
    const std::uint32_t normal = (magnitude - kRebias + 0xFFFU + (magnitude >> 13U & 1U)) >> 13U;
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kHalf);
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - kHalf;
    const std::uint32_t finite = choose(below(magnitude, kSmallestNormal), subnormal, normal);
    const std::uint32_t special = choose(below(kInfinity, magnitude), 0x7E00U, 0x7C00U);
    return static_cast<std::uint16_t>(sign | choose(below(magnitude, kTooLarge), finite, special));
  }
};

// Copies the bytes into the element, because the element may lie at any address.
template <typename Element>
HVDO_INLINE inline typename Element::Sum load(const std::byte* from, std::size_t index) {
  typename Element::Stored stored;
  std::memcpy(&stored, from + index * sizeof stored, sizeof stored);
  return Element::widen(stored);
}

template <typename Element, bool kFirst, typename... Byte>
HVDO_INLINE inline void addUp(
    typename Element::Sum* __restrict sums,
    std::size_t count,
    const std::byte* __restrict input,
    Byte* __restrict... more) {
  for (std::size_t i = 0; i < count; ++i) {
    typename Element::Sum sum = load<Element>(input, i);
    if constexpr (!kFirst) {
      sum = sums[i] + sum;
    }
    ((sum += load<Element>(more, i)), ...);
    sums[i] = sum;
  }
}

// Adds the next inputs, at most four: more at a time are not faster, fewer are slower. Returns the
// number of inputs added.
template <typename Element, bool kFirst>
HVDO_INLINE inline std::size_t addSome(
    typename Element::Sum* sums,
    std::size_t count,
    std::span<const std::byte* const> inputs,
    std::size_t offset) {
  const std::byte* const first = inputs[0] + offset;
  switch (inputs.size()) {
    case 1:
      addUp<Element, kFirst>(sums, count, first);
      return 1;
    case 2:
      addUp<Element, kFirst>(sums, count, first, inputs[1] + offset);
      return 2;
    case 3:
      addUp<Element, kFirst>(sums, count, first, inputs[1] + offset, inputs[2] + offset);
      return 3;
    default:
      addUp<Element, kFirst>(
          sums, count, first, inputs[1] + offset, inputs[2] + offset, inputs[3] + offset);
      return 4;
  }
}

template <typename Element>
HVDO_INLINE inline void
sumAll(std::span<const std::byte* const> inputs, std::byte* out, std::size_t count) {
  using Stored = typename Element::Stored;
  using Sum = typename Element::Sum;
  // Block size: blocks stay in the nearest cache, so every input and `out` are traversed once. A
  // block of `out` is written after its inputs have been read, because `out` may be one of them.
  constexpr std::size_t kBlock = 4096 / sizeof(Sum);
  alignas(64) Sum sums[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t length = std::min(kBlock, count - start);
    const std::size_t offset = start * sizeof(Stored);
    std::size_t added = addSome<Element, true>(sums, length, inputs, offset);
    while (added < inputs.size()) {
      added += addSome<Element, false>(sums, length, inputs.subspan(added), offset);
    }
    std::byte* __restrict to = out + offset;
    for (std::size_t i = 0; i < length; ++i) {
      const Stored stored = Element::round(sums[i]);
      std::memcpy(to + i * sizeof stored, &stored, sizeof stored);
    }
  }
}

template <typename Element>
void sumOf(std::span<const std::byte* const> inputs, std::byte* out, std::size_t bytes) {
  const std::size_t count = bytes / sizeof(typename Element::Stored);
  runOnWidestVectors([=]() HVDO_INLINE { sumAll<Element>(inputs, out, count); });
}

} // namespace

std::size_t sizeOf(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      return 2;
  }
  throw InvalidUsage(concat("there is no element type ", static_cast<int>(type)));
}

void sum(
    ElementType type,
    std::span<const std::byte* const> inputs,
    std::byte* out,
    std::size_t bytes) {
  if (inputs.empty()) {
    throw InvalidUsage("a sum of nothing");
  }
  if (bytes % sizeOf(type) != 0) {
    throw InvalidUsage(
        concat(bytes, " bytes are no whole number of elements of ", sizeOf(type), " bytes"));
  }
  switch (type) {
    case ElementType::kFloat32:
      return sumOf<Plain<float>>(inputs, out, bytes);
    case ElementType::kFloat64:
      return sumOf<Plain<double>>(inputs, out, bytes);
    case ElementType::kFloat16:
      return sumOf<Float16>(inputs, out, bytes);
    case ElementType::kBfloat16:
      return sumOf<Bfloat16>(inputs, out, bytes);
  }
}

} // namespace hvd_order
