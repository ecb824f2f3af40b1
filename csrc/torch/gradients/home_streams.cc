#include "torch/gradients/home_streams.h"

#include <utility>

namespace hvd_order {

namespace {

c10::Stream exchangeCurrent(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
}

} // namespace

bool StreamPoint::passed() const {
  bool all = true;
  for (const std::shared_ptr<StreamEvent>& event : events_) {
    if (!event->happened()) {
      all = false;
      event->block(currentStream(event->stream().device()));
    }
  }
  return all;
}

HomeStreams::HomeStreams(const std::vector<c10::Device>& devices) {
  for (const c10::Device& device : devices) {
    if (!device.is_cpu()) {
      streams_.push_back(currentStream(device));
    }
  }
}

void HomeStreams::follow() {
  for (c10::Stream& home : streams_) {
    const c10::Stream current = currentStream(home.device());
    if (current != home) {
      events_->record(home)->block(current);
      home = current;
    }
  }
}

void HomeStreams::waitForCurrent(const std::vector<at::Tensor>& values) {
  for (const c10::Stream& home : streams_) {
    const c10::Stream current = currentStream(home.device());
    if (current == home) {
      continue;
    }
    events_->record(current)->block(home);
    for (const at::Tensor& value : values) {
      if (value.device() == home.device()) {
        value.record_stream(home);
      }
    }
  }
}

void OnHomeStreams::enter() {
  for (const c10::Stream& home : home_->streams_) {
    outside_.push_back(exchangeCurrent(home));
  }
}

void OnHomeStreams::exit() {
  for (std::size_t i = 0; i < outside_.size(); ++i) {
    exchangeCurrent(outside_[i]);
    if (outside_[i] != home_->streams_[i]) {
      home_->events_->record(home_->streams_[i])->block(outside_[i]);
    }
  }
  outside_.clear();
}

std::shared_ptr<StreamPoint> OnHomeStreams::point() const {
  if (home_->streams_.empty()) {
    return nullptr;
  }
  std::vector<std::shared_ptr<StreamEvent>> events;
  for (const c10::Stream& home : home_->streams_) {
    events.push_back(home_->events_->record(home));
  }
  return std::make_shared<StreamPoint>(std::move(events));
}

} // namespace hvd_order
