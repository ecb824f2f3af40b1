#include "torch/c10d/slice_events.h"

#include <algorithm>
#include <utility>

namespace hvd_order {

SliceEvents::SliceEvents(SliceLayout layout, std::shared_ptr<EventPool> events)
    : layout_(std::move(layout)), events_(std::move(events)), slices_(layout_.slices().size()) {
  for (SliceIndex i = 0; i < slices_.size(); ++i) {
    slices_[i].toCome = layout_.tensorsOf(i).size();
  }
}

// A tensor either shares one slice or has slices of its own, so its first slice stands for all.
std::vector<SliceEvents::Producer> SliceEvents::produced(
    TensorId tensor,
    const c10::Stream& stream,
    std::optional<Packing> packing,
    Then then,
    Then computed) {
  const SliceIndex first = layout_.slicesOf(tensor).front();
  const std::scoped_lock lock(mutex_);
  PerSlice& slice = slices_[first];
  auto known = std::find_if(
      slice.producers.begin(), slice.producers.end(),
      [&](const Producer& producer) { return producer.stream == stream; });
  if (known == slice.producers.end()) {
    slice.producers.push_back({stream, {}, {}, {}});
    known = std::prev(slice.producers.end());
  }
  if (packing) {
    known->packings.push_back(*std::move(packing));
  }
  known->thens.push_back(std::move(then));
  known->computed.push_back(std::move(computed));
  if (--slice.toCome > 0) {
    return {};
  }
  slice.toCome = layout_.tensorsOf(first).size();
  return std::exchange(slice.producers, {});
}

void SliceEvents::setReady(
    TensorId tensor,
    const std::vector<std::shared_ptr<StreamEvent>>& events) {
  const std::scoped_lock lock(mutex_);
  for (const SliceIndex slice : layout_.slicesOf(tensor)) {
    // An all-gather of sums is issued when its reduce-scatter is done, which was behind these
    // events.
    if (layout_.isSharded() || layout_.slices()[slice].operation != Operation::kAllGather) {
      slices_[slice].ready = events;
    }
  }
}

std::vector<std::shared_ptr<StreamEvent>> SliceEvents::takeReady(SliceIndex slice) {
  const std::scoped_lock lock(mutex_);
  return std::exchange(slices_.at(slice).ready, {});
}

void SliceEvents::setSummed(SliceIndex slice, std::shared_ptr<StreamEvent> event) {
  const std::scoped_lock lock(mutex_);
  std::swap(slices_.at(slice).summed, event);
  slices_[slice].number = ++sums_;
}

// The stream that carries sums is in order, so its latest event covers the others.
void SliceEvents::orderBehindSums(TensorId tensor, const c10::Stream& stream) const {
  std::shared_ptr<StreamEvent> latest;
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    for (const SliceIndex index : layout_.slicesOf(tensor)) {
      const PerSlice& slice = slices_[index];
      if (slice.number > number) {
        number = slice.number;
        latest = slice.summed;
      }
    }
  }
  if (latest) {
    latest->block(stream);
  }
}

} // namespace hvd_order
