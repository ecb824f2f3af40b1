#include "engine/hold.h"

#include <algorithm>

namespace hvd_order {

void Hold::addModel(ModelId model, std::size_t tensors) {
  models_[model].readyAt.assign(tensors, {});
  models_[model].steps.assign(tensors, 0);
}

void Hold::removeModel(ModelId model) {
  models_.erase(model);
}

Hold::Change
Hold::ready(TensorKey tensor, const std::vector<SliceKey>& slices, Clock::time_point now) {
  Model& model = models_.at(tensor.model);
  model.readyAt[tensor.tensor] = now;
  const std::uint32_t step = ++model.steps[tensor.tensor];
  // Slices are numbered in consumption order.
  if (std::ranges::any_of(slices, [](SliceKey slice) { return slice.index == 0; })) {
    ++model.firstSlices;
    model.herald = heraldOf(model, now);
    return Change::kFirst;
  }
  // In an unusual step the first slice may have come before: nothing would end the hold.
  const bool isToCome = model.firstSlices < step;
  return tensor.tensor == model.herald && isToCome ? Change::kBegin : Change::kNone;
}

/// The last tensor that was ready a lead before the first slice. Where layers are so few or slow
/// that it came more than two leads before, the next one: a hold that long costs more than it
/// saves.
std::optional<TensorId> Hold::heraldOf(const Model& model, Clock::time_point firstSliceAt) const {
  if (lead_.count() == 0) {
    return std::nullopt;
  }
  const Clock::time_point latest = firstSliceAt - lead_;
  std::optional<TensorId> before;
  std::optional<TensorId> after;
  for (TensorId tensor = 0; tensor < model.readyAt.size(); ++tensor) {
    const Clock::time_point at = model.readyAt[tensor];
    if (at <= latest && (!before || at > model.readyAt[*before])) {
      before = tensor;
    } else if (at > latest && (!after || at < model.readyAt[*after])) {
      after = tensor;
    }
  }
  const bool isEarly = before && model.readyAt[*before] < latest - lead_;
  return isEarly ? after : before;
}

} // namespace hvd_order
