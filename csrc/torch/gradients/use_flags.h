#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace hvd_order {

/// Returns the values of use flags. A device copies them on a stream of their own, so this waits
/// for no work of the current stream.
///
/// @param flags one element each; their exchanges must have ended.
std::vector<double> readUseFlags(const std::vector<at::Tensor>& flags);

} // namespace hvd_order
