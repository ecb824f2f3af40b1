#include "servers/c10d/tensor_payload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"

namespace hvd_order {

namespace {

std::optional<ElementType> elementType(const at::Tensor& tensor) {
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
      return std::nullopt;
  }
}

} // namespace

ElementType elementTypeOf(const at::Tensor& tensor) {
  const auto type = elementType(tensor);
  if (!type) {
    throw InvalidUsage(concat(
        "parameter servers sum float32, float64, float16 and bfloat16, not ",
        c10::toString(tensor.scalar_type()), "; use all-reduce (HVD_ORDER_COMM=allreduce)"));
  }
  return *type;
}

Payload payloadOf(const at::Tensor& tensor) {
  auto host = std::make_shared<at::Tensor>(tensor.is_cpu() ? tensor : tensor.cpu());
  auto* memory = static_cast<std::byte*>(host->data_ptr());
  return {std::shared_ptr<std::byte>(std::move(host), memory), tensor.nbytes()};
}

void checkFits(const Payload& payload, const at::Tensor& tensor, bool mayBeEmpty) {
  if (payload.sizeBytes != tensor.nbytes() && !(mayBeEmpty && payload.sizeBytes == 0)) {
    throw FrameError(concat("an answer of ", payload.sizeBytes, " bytes for ", tensor.nbytes()));
  }
}

void fill(const at::Tensor& tensor, const Payload& payload) {
  if (payload.sizeBytes == 0) {
    const at::NoGradGuard noGrad;
    tensor.zero_();
    return;
  }
  if (tensor.is_cpu()) {
    std::memcpy(tensor.data_ptr(), payload.data(), payload.sizeBytes);
    return;
  }
  const at::NoGradGuard noGrad;
  const auto options = tensor.options().device(at::kCPU);
  tensor.copy_(at::from_blob(payload.data(), tensor.sizes(), options));
}

} // namespace hvd_order
