#include "engine/enqueued_slices.h"

namespace hvd_order {

void EnqueuedSlices::addModel(ModelId model, std::shared_ptr<const SliceLayout> layout) {
  if (models_.size() <= model) {
    models_.resize(model + 1);
  }
  std::vector<std::size_t> toGo;
  toGo.reserve(layout->tensors().size());
  for (TensorId tensor = 0; tensor < layout->tensors().size(); ++tensor) {
    toGo.push_back(layout->slicesOf(tensor).size());
  }
  models_[model] = {std::move(layout), std::move(toGo)};
}

void EnqueuedSlices::removeModel(ModelId model) {
  models_.at(model) = {};
}

const std::vector<TensorKey>& EnqueuedSlices::add(SliceKey slice) {
  ModelSlices& model = models_.at(slice.model);
  completed_.clear();
  for (const TensorId tensor : model.layout->tensorsOf(slice.index)) {
    if (--model.toGo[tensor] == 0) {
      model.toGo[tensor] = model.layout->slicesOf(tensor).size(); // for the next step
      completed_.push_back({slice.model, tensor});
    }
  }
  return completed_;
}

} // namespace hvd_order
