#pragma once

#include <bit>
#include <cstdint>

#include "base/vector_loops.h"

// How floats are stored, and their conversions, by integer arithmetic without branches: loops over
// it vectorise, and a GPU's compiler reads the same code.
namespace hvd_order {

namespace float_bits {

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

} // namespace float_bits

/// A format defines how elements are stored, the type in which they are added, and the conversions
/// between both: to nearest, ties to even.
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
    return static_cast<std::uint16_t>(float_bits::choose(
        float_bits::below(float_bits::kInfinity, bits & float_bits::kMagnitude), quietNan,
        nearest));
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
    const std::uint32_t finite = float_bits::choose(
        float_bits::below(magnitude, kExponentStep), subnormal, magnitude + kRebias);
    const std::uint32_t special = magnitude | float_bits::kInfinity;
    return std::bit_cast<float>(
        sign |
        float_bits::choose(float_bits::below(magnitude, 31U * kExponentStep), finite, special));
  }

  HVDO_INLINE static std::uint16_t round(float sum) {
    const auto bits = std::bit_cast<std::uint32_t>(sum);
    const std::uint32_t sign = bits >> 16U & kSign;
    const std::uint32_t magnitude = bits & float_bits::kMagnitude;
    // Same as for Bfloat16. A carry out of the fraction raises the exponent, up to infinity, as it
    // should.
    const std::uint32_t normal = (magnitude - kRebias + 0xFFFU + (magnitude >> 13U & 1U)) >> 13U;
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kHalf);
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - kHalf;
    const std::uint32_t finite =
        float_bits::choose(float_bits::below(magnitude, kSmallestNormal), subnormal, normal);
    const std::uint32_t special =
        float_bits::choose(float_bits::below(float_bits::kInfinity, magnitude), 0x7E00U, 0x7C00U);
    return static_cast<std::uint16_t>(
        sign | float_bits::choose(float_bits::below(magnitude, kTooLarge), finite, special));
  }
};

} // namespace hvd_order
