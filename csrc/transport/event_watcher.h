#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hvd_order {

/// A point in a device's work, like a CUDA event.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Whether the device has reached it. Must not block. @throws if the device failed.
  virtual bool happened() = 0;
};

/// Calls a function when a device event has happened.
///
/// Devices offer no callback that is cheap and may call into a communication library, so one
/// thread polls the events. It sleeps while there are none. Events of one queue belong to one
/// stream and happen in the order in which they were recorded, so only the oldest is polled. Queues
/// with lower numbers come first, also among events that happen between two looks.
///
/// Thread safety: `add` may be called from any thread.
class EventWatcher final {
 public:
  /// Called with null when the event has happened, else with the device's error.
  using Then = std::function<void(std::exception_ptr error)>;

  /// @param pause time between two polls.
  explicit EventWatcher(std::chrono::microseconds pause = kPause);
  /// Drops the events that have not happened; their functions are not called. A function that the
  /// watcher calls may destroy the watcher.
  ~EventWatcher();
  EventWatcher(const EventWatcher&) = delete;
  EventWatcher& operator=(const EventWatcher&) = delete;

  /// @param queue a small number for the stream on which the event was recorded.
  void add(std::size_t queue, std::shared_ptr<DeviceEvent> event, Then then);

 private:
  struct WatchedEvent {
    std::shared_ptr<DeviceEvent> event;
    Then then;
  };

  /// Shared with the thread, so that it outlives a watcher that is destroyed by a function that
  /// the thread called.
  struct WatcherState {
    std::mutex mutex; // guards all below
    std::condition_variable wakeUp;
    std::vector<std::deque<WatchedEvent>> queues;
    std::size_t outstanding = 0;
    bool stop = false;
  };

  // A slice takes 100 us or more on the fastest links, so this delay hardly changes the order.
  // Polling without a pause would take a core from the data loader.
  static constexpr std::chrono::microseconds kPause{20};

  static void run(WatcherState& state, std::chrono::microseconds pause);

  std::shared_ptr<WatcherState> state_ = std::make_shared<WatcherState>();
  std::thread thread_;
};

} // namespace hvd_order
