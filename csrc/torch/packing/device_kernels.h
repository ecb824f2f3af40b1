#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/error.h"
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

/// Calls launch(table, stream) on the current stream of a device.
/// @throws InvalidUsage if there are no kernels for it, DeviceFailed if `launch` returns an error
/// in
///   words.
template <typename Launch>
void launchOn(const c10::Device& device, const Launch& launch) {
  if (kernelsOf(device.type()) == nullptr) {
    throw InvalidUsage(c10::str("hvd_order has no kernels for ", device));
  }
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const char* error = launch(*kernelsOf(device.type()), handleOf(stream));
  if (error != nullptr) {
    throw DeviceFailed(c10::str("a kernel of hvd_order cannot run on ", device, ": ", error));
  }
}

} // namespace hvd_order
