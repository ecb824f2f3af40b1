#include "torch/packing/element_type.h"

#include "base/error.h"

namespace hvd_order {

ElementType elementTypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBFloat16:
      return ElementType::kBfloat16;
    default:
      throw InvalidUsage(concat(
          "parameter servers, shards and encoded sums take float32, float64, float16 and bfloat16, "
          "not ",
          c10::toString(tensor.scalar_type()),
          "; use all-reduce of whole gradients (HVD_ORDER_COMM=allreduce, sharded=False, "
          "Compression.none)"));
  }
}

} // namespace hvd_order
