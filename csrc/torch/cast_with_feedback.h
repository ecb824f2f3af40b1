#pragma once

#include <cmath>
#include <limits>

namespace hvd_order {

/// Casts a gradient to 16 bits and keeps what the cast loses for the next step.
///
/// e = scale * gradient + residual; out = cast(e), to nearest, ties to even; residual = e - out. So
/// the sum of what is sent over the steps differs from the sum of the gradients by one rounding
/// error, not by one a step.
///
/// A cast that overflows, or a gradient that is not finite, leaves a residual of 0: the receiver
/// must see the infinity (GradScaler then skips the step), and later steps must not.
///
/// Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, section 3; for the
/// convergence Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019.
///
/// @tparam Narrow c10::BFloat16 or c10::Half.
template <typename Narrow>
struct CastWithFeedback {
  float scale;

  Narrow operator()(float gradient, float& residual) const {
    const float exact = scale * gradient + residual;
    const auto out = static_cast<Narrow>(exact);
    const float lost = exact - static_cast<float>(out);
    residual = std::fabs(lost) <= std::numeric_limits<float>::max() ? lost : 0.0F; // else inf or nan
    return out;
  }
};

} // namespace hvd_order
