#include "c10d/shard.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "c10d/server/tensor_payload.h"
#include "server/arithmetic/element_sum.h"

namespace hvd_order {

Shard shardOf(std::int64_t elements, int rank, int size) {
  const std::int64_t part = (elements + size - 1) / size;
  const std::int64_t begin = std::min(elements, rank * part);
  return {begin, std::min(elements, begin + part) - begin};
}

void writeSquare(const at::Tensor& values, const at::Tensor& square) {
  if (values.is_cpu()) {
    *square.mutable_data_ptr<double>() = sumOfSquares(
        elementTypeOf(values), static_cast<const std::byte*>(values.const_data_ptr()),
        static_cast<std::size_t>(values.nbytes()));
    return;
  }
  square.copy_(values.to(at::kDouble).square().sum());
}

} // namespace hvd_order
