#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "c10d/torch_transport.h"

namespace hvd_order {

/// Returns the sums of the use flags of some tensors. On a device this blocks until these sums have
/// arrived, but for no other work of the current stream.
///
/// @param flags one element each, of `tensors`; their exchanges must be enqueued or have ended.
std::vector<double> readUseFlags(
    TorchTransport& transport,
    ModelId model,
    const std::vector<TensorId>& tensors,
    const std::vector<at::Tensor>& flags);

} // namespace hvd_order
