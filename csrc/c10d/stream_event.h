#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/event_watcher.h"

namespace hvd_order {

/// Device events that are used again. The driver creates an event under the lock of the device's
/// context, which other threads hold while they launch work; recording takes no such lock.
///
/// Thread safety: every method may be called from any thread.
class EventPool final : public std::enable_shared_from_this<EventPool> {
 public:
  /// Returns an event that happens when all work enqueued on a stream so far has run. The pool must
  /// be owned by a shared_ptr; the event keeps it alive.
  std::unique_ptr<DeviceEvent> record(const c10::Stream& stream) {
    c10::Event event = take(stream.device());
    event.record(stream);
    return std::make_unique<Pooled>(shared_from_this(), stream.device(), std::move(event));
  }

 private:
  class Pooled final : public DeviceEvent {
   public:
    Pooled(std::shared_ptr<EventPool> pool, c10::Device device, c10::Event event)
        : pool_(std::move(pool)), device_(device), event_(std::move(event)) {}
    Pooled(const Pooled&) = delete;
    Pooled& operator=(const Pooled&) = delete;
    ~Pooled() override {
      pool_->giveBack(device_, std::move(event_));
    }
    bool happened() override {
      return event_.query();
    }

   private:
    std::shared_ptr<EventPool> pool_;
    c10::Device device_;
    c10::Event event_;
  };

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

  void giveBack(const c10::Device& device, c10::Event event) {
    const std::scoped_lock lock(mutex_);
    free_.emplace_back(device, std::move(event));
  }

  std::mutex mutex_;
  std::vector<std::pair<c10::Device, c10::Event>> free_; // an event belongs to one device
};

} // namespace hvd_order
