#pragma once

#include <ATen/core/Tensor.h>

#include "server/arithmetic/element_sum.h"
#include "server/wire/payload.h"

namespace hvd_order {

/// @throws InvalidUsage for a tensor that parameter servers cannot sum.
ElementType elementTypeOf(const at::Tensor& tensor);
/// What is sent from a tensor: its own memory, or a copy of it that the host can read.
Payload payloadOf(const at::Tensor& tensor);
/// Writes what came into a tensor of as many bytes; zeros if nothing came.
void fill(const at::Tensor& tensor, const Payload& payload);

} // namespace hvd_order
