#include "torch/c10d/shard.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/element_sum.h"
#include "torch/packing/element_type.h"

namespace hvd_order {

namespace {

// Two slices of one tensor may have their sums at once. NaN is above all numbers.
void raise(double& largest, double size) {
  const std::atomic_ref<double> shared(largest);
  double before = shared.load();
  while (!(std::isnan(before) || before >= size) && !shared.compare_exchange_weak(before, size)) {
  }
}

} // namespace

Shard shardOf(std::int64_t elements, int rank, int size) {
  const std::int64_t part = (elements + size - 1) / size;
  const std::int64_t begin = std::min(elements, rank * part);
  return {begin, std::min(elements, begin + part) - begin};
}

void writeNorms(const at::Tensor& values, const at::Tensor& square, const at::Tensor& largest) {
  if (values.is_cpu()) {
    const ElementType type = elementTypeOf(values);
    const auto* const elements = static_cast<const std::byte*>(values.const_data_ptr());
    const auto bytes = static_cast<std::size_t>(values.nbytes());
    if (!largest.defined()) {
      *square.mutable_data_ptr<double>() = sumOfSquares(type, elements, bytes);
      return;
    }
    const Norms norms = normsOf(type, elements, bytes);
    *square.mutable_data_ptr<double>() = norms.squares;
    raise(*largest.mutable_data_ptr<double>(), norms.largest);
    return;
  }
  square.copy_(values.to(at::kDouble).square().sum());
  if (largest.defined() && values.numel() > 0) { // no elements have no maximum
    const at::Tensor size = at::linalg_vector_norm(values, std::numeric_limits<double>::infinity());
    // In one operation: threads enqueue on the stream in turns, and between a maximum and its copy
    // another slice's would be lost.
    at::Tensor out = largest;
    at::maximum_out(out, largest, size.to(at::kDouble));
  }
}

} // namespace hvd_order
