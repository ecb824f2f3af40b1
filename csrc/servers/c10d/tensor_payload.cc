#include "servers/c10d/tensor_payload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <utility>

#include "base/error.h"
#include "servers/wire/frame.h"

namespace hvd_order {

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
