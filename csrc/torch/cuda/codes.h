#pragma once

#include <cstdint>

#include "base/float_format.h"

// The arithmetic of 8-bit codes, for the host and for CUDA; compiled without contraction of
// products and sums, so both give the same bits.
//
// A block of up to kBlock values is sent as one float32, its scale, and a code for each value. A
// value is code * scale, and the largest one has the code 127 or -127. Rounding is to nearest, ties
// to even.
//
// A block with values that are not finite has the sign bit of its scale set. There 127 and -127 are
// the infinities, -128 is NaN, and the largest finite value has the code 126 or -126.
//
// The residual is what the receivers still lack: exact = value + residual is encoded, and
// exact - decoded is the new residual. So the sum of what is sent over the steps differs from the
// sum of the values by one rounding error, not by one a step. Values that are not finite leave a
// residual of 0 (as in elements.h).
namespace hvd_order {

inline constexpr std::int64_t kBlock = 256;

namespace codes {

inline constexpr std::int32_t kInfinity = 127;
inline constexpr std::int32_t kNan = -128;

// Adding it rounds a float32 of at most 2^22 to an integer, in its low bits.
inline constexpr float kRounder = 12582912.0F; // 1.5 * 2^23
inline constexpr std::uint32_t kRounderBits = 0x4B400000U;
// Below it the scale would have fewer bits than a normal number, and 1 / scale none.
inline constexpr float kSmallest = 0x1p-119F;

HVDO_INLINE inline std::uint32_t magnitude(float value) {
  return std::bit_cast<std::uint32_t>(value) & float_bits::kMagnitude;
}

HVDO_INLINE inline bool isSpecial(float scale) {
  return (std::bit_cast<std::uint32_t>(scale) >> 31U) != 0;
}

/// How the values of one block are rounded.
struct Rounding {
  float scale;   ///< as it is sent
  float step;    ///< its magnitude
  float inverse; ///< 1 / step; 0 if all codes are 0
};

/// @param largest largest magnitude among the finite values of the block.
HVDO_INLINE inline Rounding roundingOf(float largest, bool special) {
  if (largest < kSmallest) {
    return {special ? -0.0F : 0.0F, 0.0F, 0.0F};
  }
  const float step = largest / (special ? 126.0F : 127.0F);
  return {special ? -step : step, step, 1.0F / step};
}

/// A finite value, rounded.
struct Rounded {
  std::int32_t code;
  float value; ///< what the receiver decodes
};

HVDO_INLINE inline Rounded rounded(float exact, const Rounding& rounding) {
  const float shifted = exact * rounding.inverse + kRounder;
  const auto code = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(shifted) - kRounderBits);
  return {code, (shifted - kRounder) * rounding.step};
}

/// A value of a block that has values that are not finite.
HVDO_INLINE inline Rounded roundedInSpecial(float exact, const Rounding& rounding) {
  const std::uint32_t bits = magnitude(exact);
  if (bits < float_bits::kInfinity) {
    return rounded(exact, rounding);
  }
  if (bits > float_bits::kInfinity) {
    return {kNan, exact};
  }
  return {exact > 0 ? kInfinity : -kInfinity, exact};
}

HVDO_INLINE inline float decoded(std::int32_t code, float scale) {
  return static_cast<float>(code) * scale;
}

HVDO_INLINE inline float decodedInSpecial(std::int32_t code, float scale) {
  if (code == kNan) {
    return std::bit_cast<float>(0x7FC00000U);
  }
  if (code == kInfinity || code == -kInfinity) {
    return std::bit_cast<float>(float_bits::kInfinity | (code < 0 ? 0x80000000U : 0U));
  }
  return static_cast<float>(code) * -scale;
}

/// What a receiver still lacks of a value.
HVDO_INLINE inline float lacking(float exact, float received) {
  const auto lost = std::bit_cast<std::uint32_t>(exact - received);
  return std::bit_cast<float>(float_bits::choose(
      float_bits::below(lost & float_bits::kMagnitude, float_bits::kInfinity), lost, 0));
}

} // namespace codes

} // namespace hvd_order
