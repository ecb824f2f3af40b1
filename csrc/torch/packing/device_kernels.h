#pragma once

#include <c10/core/Stream.h>

#include "torch/cuda/kernel_table.h"

namespace hvd_order {

/// Sets the kernels of a type of device, for the rest of the process. The table must stay.
/// @throws InvalidUsage if the table is of another version, or if this PyTorch does not tell the
///   driver's handle of a stream.
void registerKernels(c10::DeviceType type, const KernelTable* kernels);

/// Returns the kernels of a type of device; null if it has none.
const KernelTable* kernelsOf(c10::DeviceType type);

/// Returns the driver's handle of a stream.
void* handleOf(const c10::Stream& stream);

} // namespace hvd_order
