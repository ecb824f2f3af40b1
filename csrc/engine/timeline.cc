#include "engine/timeline.h"

#include <utility>

namespace hvd_order {

void Timeline::start() {
  const std::scoped_lock lock(mutex_);
  current_.clear(); // transfers that ended while recording was off
  recording_ = true;
}

void Timeline::stop() {
  recording_ = false;
}

std::vector<SliceEvent> Timeline::take() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(finished_, {});
}

void Timeline::ready(SliceKey slice) {
  if (recording_) {
    const std::scoped_lock lock(mutex_);
    current(slice) = {slice, nowNs(), 0, 0};
  }
}

void Timeline::issued(SliceKey slice) {
  if (recording_) {
    const std::scoped_lock lock(mutex_);
    current(slice).issuedNs = nowNs();
  }
}

void Timeline::done(SliceKey slice) {
  if (!recording_) {
    return;
  }
  const std::scoped_lock lock(mutex_);
  SliceEvent& event = current(slice);
  event.doneNs = nowNs();
  if (event.readyNs != 0 && event.issuedNs != 0) { // else recording began during the transfer
    finished_.push_back(event);
  }
  event = {};
}

SliceEvent& Timeline::current(SliceKey slice) {
  if (current_.size() <= slice.model) {
    current_.resize(slice.model + 1);
  }
  auto& model = current_[slice.model];
  if (model.size() <= slice.index) {
    model.resize(slice.index + 1);
  }
  return model[slice.index];
}

} // namespace hvd_order
