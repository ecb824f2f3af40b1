#pragma once

#include <ATen/core/Tensor.h>

#include "base/element_sum.h"

namespace hvd_order {

/// Element type of a tensor. @throws InvalidUsage if `sum` cannot add such tensors.
ElementType elementTypeOf(const at::Tensor& tensor);

} // namespace hvd_order
