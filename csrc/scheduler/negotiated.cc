#include "scheduler/negotiated.h"

#include <algorithm>

#include "base/error.h"

namespace hvd_order {

void Negotiator::addModel(
    ModelId model,
    std::shared_ptr<const SliceLayout> layout,
    std::vector<SliceIndex> plan) {
  const std::size_t slices = layout->slices().size();
  Leader::addModel(model, std::move(layout), std::move(plan));
  if (reports_.size() <= model) {
    reports_.resize(model + 1);
  }
  reports_[model].assign(slices, 0);
  const auto mine = std::stable_partition(
      early_.begin(), early_.end(), [model](SliceKey s) { return s.model != model; });
  const std::vector<SliceKey> reported(mine, early_.end());
  early_.erase(mine, early_.end());
  received(0, reported);
}

const std::vector<SliceKey>& Negotiator::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  for (const SliceKey slice : ready) {
    count(slice);
  }
  return ready;
}

void Negotiator::received(Rank /*from*/, std::span<const SliceKey> slices) {
  for (const SliceKey slice : slices) {
    if (scheduler_.hasModel(slice.model)) {
      count(slice);
    } else {
      early_.push_back(slice);
    }
  }
}

void Negotiator::count(SliceKey slice) {
  int& reports = reports_[slice.model].at(slice.index);
  if (++reports == size_) {
    reports = 0;
    scheduler_.offer(slice);
  }
}

const std::vector<SliceKey>& Negotiating::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  unreported_.insert(unreported_.end(), ready.begin(), ready.end());
  return ready;
}

void Negotiating::decide(Decisions& out) {
  if (!unreported_.empty()) {
    out.messages.push_back({0, unreported_});
    unreported_.clear();
  }
  Follower::decide(out);
}

} // namespace hvd_order
