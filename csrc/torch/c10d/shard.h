#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hvd_order {

/// The part of a slice that one rank sums in a split all-reduce, in elements. All parts are equally
/// long, apart from the last ones.
struct Shard {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

/// Returns the shard of rank `rank` of `size` ranks.
Shard shardOf(std::int64_t elements, int rank, int size);

/// Writes the sum of squares of `values` into `square`, and raises `largest`, if it is defined, to
/// their largest absolute value, or to NaN if one is NaN. Each is one float64 on the same device;
/// on a device this happens on the current stream. Several threads may raise one `largest`. Squares
/// do not overflow unless the values are float64.
void writeNorms(const at::Tensor& values, const at::Tensor& square, const at::Tensor& largest);

} // namespace hvd_order
