#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace hvd_order {

/// A gradient on its way into its place in a buffer: to = cast(scale * from).
struct Packing {
  at::Tensor from;
  at::Tensor to;
  double scale = 1.0;
};

/// Whether `pack` can put one tensor into the other: same shape and device, both strided, and the
/// same dtype, or 16 bits made from more.
bool canPack(const at::Tensor& from, const at::Tensor& to);

/// Whether it pays to pack the tensor together with others: the device has kernels for that, and
/// the tensor is so small that its launch costs more than its bytes.
bool isBestPackedWithOthers(const Packing& packing);

/// Packs all, on the current streams of their devices: in one launch where the device has kernels,
/// else with one or a few operators of PyTorch for each.
/// @throws DeviceFailed if a kernel cannot be launched.
void pack(std::span<const Packing> packings);

/// A sum of 16 bits on its way out of its buffer: to = scale * from. Both have one shape, device
/// and strides.
struct Unpacking {
  at::Tensor from;
  at::Tensor to;
};

/// Unpacks all, on the current streams of their devices.
/// @param squares whether to add up the squares of what is put into `to`.
/// @return for each, on its device, float64 tensors whose sum is the sum of squares; with `squares`
///   false, or where the device has no kernels, undefined tensors.
/// @throws DeviceFailed if a kernel cannot be launched.
std::vector<at::Tensor> unpack(std::span<const Unpacking> unpackings, double scale, bool squares);

} // namespace hvd_order
