#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/event_watcher.h"

namespace hvd_order {

class EventPool;

/// A point in the work of one stream. The event goes back to its pool with its last owner.
///
/// Thread safety: every method may be called from any thread.
class StreamEvent final : public DeviceEvent {
 public:
  StreamEvent(std::shared_ptr<EventPool> pool, const c10::Stream& stream, c10::Event event);
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;
  ~StreamEvent() override;

  [[nodiscard]] const c10::Stream& stream() const {
    return stream_;
  }
  bool happened() override {
    return event_.query();
  }
  /// Makes `waiter` wait for this point. No effect on the event's own stream, which is in order.
  void block(const c10::Stream& waiter) const {
    if (waiter != stream_) {
      event_.block(waiter);
    }
  }

 private:
  std::shared_ptr<EventPool> pool_;
  c10::Stream stream_;
  c10::Event event_;
};

/// Device events that are used again. The driver creates an event under the lock of the device's
/// context, which other threads hold while they launch work; recording takes no such lock.
///
/// Thread safety: every method may be called from any thread.
class EventPool final : public std::enable_shared_from_this<EventPool> {
 public:
  /// Returns an event that happens when all work enqueued on a stream so far has run. The pool must
  /// be owned by a shared_ptr; the event keeps it alive.
  std::shared_ptr<StreamEvent> record(const c10::Stream& stream) {
    c10::Event event = take(stream.device());
    event.record(stream);
    return std::make_shared<StreamEvent>(shared_from_this(), stream, std::move(event));
  }

  void giveBack(const c10::Device& device, c10::Event event) {
    const std::scoped_lock lock(mutex_);
    free_.emplace_back(device, std::move(event));
  }

 private:
  c10::Event take(const c10::Device& device) {
    const std::scoped_lock lock(mutex_);
    const auto known = std::find_if(
        free_.begin(), free_.end(), [&](const auto& each) { return each.first == device; });
    if (known == free_.end()) {
      return c10::Event(device.type(), c10::EventFlag::PYTORCH_DEFAULT);
    }
    c10::Event event = std::move(known->second);
    free_.erase(known);
    return event;
  }

  std::mutex mutex_;
  std::vector<std::pair<c10::Device, c10::Event>> free_; // an event belongs to one device
};

inline StreamEvent::StreamEvent(
    std::shared_ptr<EventPool> pool,
    const c10::Stream& stream,
    c10::Event event)
    : pool_(std::move(pool)), stream_(stream), event_(std::move(event)) {}

inline StreamEvent::~StreamEvent() {
  pool_->giveBack(stream_.device(), std::move(event_));
}

/// Returns the stream of this thread on which operators of a device run.
inline c10::Stream currentStream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace hvd_order
