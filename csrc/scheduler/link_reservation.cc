#include "scheduler/link_reservation.h"

#include <algorithm>

// Predicts the first slice from the last step, and stops large slices one lead before it.
//
// Each tensor records when it was last ready. When the first slice (index 0) is ready, the trigger
// tensor of the next step is chosen: the last tensor that was ready at least one lead before.
//
// States: off; on, from the readiness of the trigger tensor; alone, from the readiness of the
// first slice. A reservation ends when the first slice has arrived, one lead after it became
// ready, when a reader waits before it is ready, or at once if the first slice is itself larger
// than the limit, because then it is as large as the slices that it would be protected from.
//
// A model whose layout is split makes no reservation: its first slice, the squares, becomes ready
// by the end of another slice, not with a tensor, so nothing would end the reservation.
//
// Invariant: a reservation starts only if the first slice of the step is still to come, so some
// event ends it. The limit is an eighth of the credit; slices up to it may still start.
//
// docs/architecture.md, "Slice size and credit", has the figures (4 hosts: 26 ms instead of 10).

namespace hvd_order {

void LinkReservation::retune(std::chrono::nanoseconds lead, ByteCount creditBytes) {
  lead_ = lead;
  limitBytes_ = creditBytes / 8;
}

void LinkReservation::addModel(ModelId model, const SliceLayout& layout) {
  ModelReservation& added = models_[model];
  added.reserves = !layout.isSplit();
  added.firstSliceBytes = layout.slices().empty() ? 0 : layout.slices().front().sizeBytes;
  added.readyAt.assign(layout.tensors().size(), {});
  added.steps.assign(layout.tensors().size(), 0);
}

void LinkReservation::removeModel(ModelId model) {
  models_.erase(model);
}

bool LinkReservation::ready(
    TensorKey tensor,
    const std::vector<SliceKey>& slices,
    Clock::time_point now) {
  ModelReservation& model = models_.at(tensor.model);
  if (!model.reserves) {
    return false;
  }
  model.readyAt[tensor.tensor] = now;
  const std::uint32_t step = ++model.steps[tensor.tensor];
  // Slices are numbered in consumption order.
  const auto first = std::ranges::find_if(slices, [](SliceKey slice) { return slice.index == 0; });
  if (first != slices.end()) {
    ++model.firstSlices;
    model.trigger = triggerOf(model, now);
    return firstSliceReady(*first, model.firstSliceBytes, now);
  }
  // In an unusual step the first slice may already have come: nothing would end a reservation.
  const bool isToCome = model.firstSlices < step;
  if (on_ || tensor.tensor != model.trigger || !isToCome) {
    return false;
  }
  on_ = true;
  return true;
}

bool LinkReservation::firstSliceReady(SliceKey slice, ByteCount bytes, Clock::time_point now) {
  if (!on_) {
    return false;
  }
  if (bytes > limitBytes_) {
    return end(); // as large as the slices that it would be protected from
  }
  alone_ = slice;
  aloneUntil_ = now + lead_;
  return true;
}

bool LinkReservation::done(SliceKey slice) {
  return slice == alone_ && end();
}

bool LinkReservation::someoneWaits() {
  return on_ && !alone_ && end();
}

bool LinkReservation::expire(Clock::time_point now) {
  return alone_ && now >= aloneUntil_ && end();
}

bool LinkReservation::end() {
  on_ = false;
  alone_.reset();
  return true;
}

/// The last tensor that was ready at least one lead before the first slice. If layers are so few
/// or slow that it was ready more than two leads before, the tensor after it: a reservation that
/// long costs more than it saves.
std::optional<TensorId> LinkReservation::triggerOf(
    const ModelReservation& model,
    Clock::time_point firstSliceAt) const {
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
