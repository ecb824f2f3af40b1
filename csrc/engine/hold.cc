#include "engine/hold.h"

namespace hvd_order {

void Hold::addModel(ModelId model, std::size_t tensors) {
  models_[model].readyAt.assign(tensors, {});
  models_[model].steps.assign(tensors, 0);
}

void Hold::removeModel(ModelId model) {
  models_.erase(model);
}

Hold::Change Hold::ready(TensorKey tensor, Clock::time_point now) {
  Model& model = models_.at(tensor.model);
  model.readyAt[tensor.tensor] = now;
  const std::uint32_t step = ++model.steps[tensor.tensor];
  if (tensor.tensor == kFirst) {
    model.herald = heraldOf(model);
    return Change::kEnd;
  }
  // In an unusual step the first tensor may have come before: nothing would end the hold.
  const bool firstToCome = model.steps[kFirst] < step;
  return tensor.tensor == model.herald && firstToCome ? Change::kBegin : Change::kNone;
}

/// The last tensor that was ready a lead before the first one.
TensorId Hold::heraldOf(const Model& model) const {
  TensorId herald = kNone;
  if (lead_.count() == 0) {
    return herald;
  }
  const Clock::time_point latest = model.readyAt[kFirst] - lead_;
  for (TensorId tensor = kFirst + 1; tensor < model.readyAt.size(); ++tensor) {
    if (model.readyAt[tensor] <= latest &&
        (herald == kNone || model.readyAt[tensor] > model.readyAt[herald])) {
      herald = tensor;
    }
  }
  return herald;
}

} // namespace hvd_order
