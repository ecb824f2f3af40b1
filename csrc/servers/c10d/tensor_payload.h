#pragma once

#include <ATen/core/Tensor.h>

#include "servers/wire/payload.h"

namespace hvd_order {

/// Payload with a tensor's content: the tensor's own memory, or a copy in host memory.
Payload payloadOf(const at::Tensor& tensor);
/// Requires that an answer has as many bytes as the tensor, or perhaps none. @throws FrameError
void checkFits(const Payload& payload, const at::Tensor& tensor, bool mayBeEmpty);
/// Writes a payload into a tensor of the same number of bytes; writes zeros if the payload is
/// empty.
void fill(const at::Tensor& tensor, const Payload& payload);

} // namespace hvd_order
