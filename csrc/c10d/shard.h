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

/// Writes the sum of squares of `values` into `square`, one float64 on the same device; on a device
/// on the current stream. Does not overflow unless the values are float64.
void writeSquare(const at::Tensor& values, const at::Tensor& square);

} // namespace hvd_order
