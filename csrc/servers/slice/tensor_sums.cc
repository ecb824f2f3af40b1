#include "servers/slice/tensor_sums.h"

#include <memory>
#include <utility>

#include "base/error.h"
#include "servers/wire/frame.h"

namespace hvd_order {

std::optional<Payload>
TensorSums::add(int worker, std::uint64_t name, std::uint32_t typeNumber, Payload tensor) {
  const auto type = static_cast<ElementType>(typeNumber);
  if (typeNumber > static_cast<std::uint32_t>(ElementType::kBfloat16) || tensor.sizeBytes == 0 ||
      tensor.sizeBytes % sizeOf(type) != 0) {
    throw FrameError(concat("a tensor of ", tensor.sizeBytes, " bytes of type ", typeNumber));
  }
  const std::scoped_lock lock(mutex_);
  if (!sums_.contains(name) && sums_.size() >= kMost) {
    throw FrameError("too many tensors wait to be summed");
  }
  OpenSum& sum = sums_[name];
  if (sum.store == nullptr) {
    sum.shape = {static_cast<std::uint32_t>(tensor.sizeBytes), type, {}};
    sum.store = std::make_unique<SliceStore>(
        sum.shape, /*serversUpdate=*/false, Consistency::kSynchronous, workers_);
    sum.store->begin({});
  }
  if (tensor.sizeBytes != sum.shape.sizeBytes || type != sum.shape.type) {
    throw FrameError("workers sum tensors of different sizes under one name");
  }
  sum.store->push(worker, 1, std::move(tensor));
  const auto update = sum.store->advance({}, /*measureChange=*/false);
  if (!update) {
    return std::nullopt;
  }
  sums_.erase(name);
  return update->sum;
}

} // namespace hvd_order
