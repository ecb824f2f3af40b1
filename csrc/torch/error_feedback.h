#pragma once

#include <ATen/core/Tensor.h>

namespace hvd_order {

/// Sets out = cast(scale * gradient + residual), and `residual` to what the cast has lost
/// (cast_with_feedback.h), in one pass over the memory on the CPU.
///
/// @param gradient of any strided layout. @param residual of the gradient's dtype.
/// @param out bfloat16 or float16. All three have one shape and device; residual and out are dense
///   and have the same strides.
void castWithFeedback(
    const at::Tensor& gradient,
    double scale,
    at::Tensor& residual,
    at::Tensor& out);

} // namespace hvd_order
