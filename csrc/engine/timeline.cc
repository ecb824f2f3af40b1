#include "engine/timeline.h"

#include <utility>

namespace hvd_order {

void Timeline::start() {
  const std::scoped_lock lock(mutex_);
  for (auto& model : last_) { // transfers under way began before the recording
    for (SliceEvent& event : model) {
      event.readyNs = 0;
    }
  }
  recording_ = true;
}

void Timeline::stop() {
  const std::scoped_lock lock(mutex_);
  recording_ = false;
}

std::vector<SliceEvent> Timeline::take() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(finished_, {});
}

std::vector<SliceEvent> Timeline::last(ModelId model) {
  const std::scoped_lock lock(mutex_);
  return model < last_.size() ? last_[model] : std::vector<SliceEvent>();
}

void Timeline::forget(ModelId model) {
  const std::scoped_lock lock(mutex_);
  if (model < last_.size()) {
    last_[model] = {};
  }
}

void Timeline::ready(SliceKey slice) {
  const TimeNs now = nowNs();
  const std::scoped_lock lock(mutex_);
  current(slice) = {slice, now, 0, 0};
}

void Timeline::issued(SliceKey slice) {
  const TimeNs now = nowNs();
  const std::scoped_lock lock(mutex_);
  current(slice).issuedNs = now;
}

void Timeline::done(SliceKey slice) {
  const TimeNs now = nowNs();
  const std::scoped_lock lock(mutex_);
  SliceEvent& event = current(slice);
  event.doneNs = now;
  if (recording_ && event.readyNs != 0) {
    finished_.push_back(event);
  }
}

SliceEvent& Timeline::current(SliceKey slice) {
  if (last_.size() <= slice.model) {
    last_.resize(slice.model + 1);
  }
  auto& model = last_[slice.model];
  if (model.size() <= slice.index) {
    model.resize(slice.index + 1);
  }
  return model[slice.index];
}

} // namespace hvd_order
