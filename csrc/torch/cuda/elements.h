#pragma once

#include "base/float_format.h"

// The arithmetic of one element, for the host and for CUDA. Both are compiled without contraction
// of products and sums, so both give the same bits.
namespace hvd_order {

/// A float32 as it is stored, with the names of the 16-bit formats.
using Float32 = Plain<float>;

/// Returns cast(scale * from).
template <typename From, typename To>
HVDO_INLINE inline typename To::Stored scaled(typename From::Stored from, float scale) {
  return To::round(From::widen(from) * scale);
}

/// Casts a value to 16 bits and keeps what the cast loses for the next step.
///
/// exact = value + residual; out = cast(exact); residual = exact - out. So the sum of
/// what is sent over the steps differs from the sum of the values by one rounding error, not by
/// one a step.
///
/// A cast that overflows, or a value that is not finite, leaves a residual of 0: the receiver
/// must see the infinity (GradScaler then skips the step), and later steps must not.
///
/// Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, section 3; for the
/// convergence Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019.
template <typename To>
HVDO_INLINE inline typename To::Stored withFeedback(float value, float& residual) {
  const float exact = value + residual;
  const typename To::Stored out = To::round(exact);
  const auto lost = std::bit_cast<std::uint32_t>(exact - To::widen(out));
  const std::uint32_t finite = float_bits::choose(
      float_bits::below(lost & float_bits::kMagnitude, float_bits::kInfinity), lost, 0);
  residual = std::bit_cast<float>(finite);
  return out;
}

// The sum of squares of a chunk has one order of additions on every machine: groups of eight
// elements go to the lanes in turn, a lane adds its elements in order, and the upper half of the
// lanes is added to the lower half until one is left.
inline constexpr int kLanes = 256;
inline constexpr int kGroup = 8;

} // namespace hvd_order
