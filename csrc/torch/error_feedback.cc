#include "torch/error_feedback.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "torch/cast_with_feedback.h"

namespace hvd_order {

namespace {

template <typename Narrow>
void onCpu(const at::Tensor& gradient, float scale, at::Tensor& residual, at::Tensor& out) {
  const CastWithFeedback<Narrow> cast{scale};
  const float* from = gradient.const_data_ptr<float>();
  float* left = residual.mutable_data_ptr<float>();
  Narrow* to = out.mutable_data_ptr<Narrow>();
  at::parallel_for(
      0, gradient.numel(), at::internal::GRAIN_SIZE, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          to[i] = cast(from[i], left[i]);
        }
      });
}

/// The same with operators of torch, for other devices and for float64: several passes.
void byOperators(
    const at::Tensor& gradient,
    double scale,
    at::Tensor& residual,
    at::Tensor& out) {
  residual.add_(gradient.mul(scale));
  out.copy_(residual);
  residual.sub_(out);
  residual.nan_to_num_(0.0, 0.0, 0.0);
}

} // namespace

void castWithFeedback(
    const at::Tensor& gradient,
    double scale,
    at::Tensor& residual,
    at::Tensor& out) {
  const at::NoGradGuard noGrad;
  const bool fits = gradient.is_cpu() && gradient.scalar_type() == at::kFloat &&
      residual.scalar_type() == at::kFloat;
  if (!fits) {
    byOperators(gradient, scale, residual, out);
    return;
  }
  // The same order of elements in memory.
  const at::Tensor dense = gradient.strides() == out.strides() && gradient.layout() == at::kStrided
      ? gradient
      : at::empty_like(residual).copy_(gradient);
  const auto factor = static_cast<float>(scale);
  if (out.scalar_type() == at::kBFloat16) {
    onCpu<c10::BFloat16>(dense, factor, residual, out);
  } else {
    onCpu<c10::Half>(dense, factor, residual, out);
  }
}

} // namespace hvd_order
