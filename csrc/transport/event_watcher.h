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

/// Something a device will have done at some time, like a CUDA event.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Whether it has happened. Must not block. @throws if the device failed.
  virtual bool happened() = 0;
};

/// Calls a function when a device event has happened.
///
/// Devices offer no callback that is cheap and may call into a communication library, so one
/// thread asks; it sleeps while nothing is outstanding. Events of one queue happen in the order in
/// which they were recorded (they are of one stream), so only the oldest is asked for.
///
/// Thread safety: `add` may be called from any thread.
class EventWatcher final {
 public:
  /// Called with null when the event has happened, else with the device's error.
  using Then = std::function<void(std::exception_ptr error)>;

  /// @param pause between two looks at what has not happened yet.
  explicit EventWatcher(std::chrono::microseconds pause = kPause);
  /// Drops what is outstanding: its functions are not called. One of them may be what destroys
  /// the watcher.
  ~EventWatcher();
  EventWatcher(const EventWatcher&) = delete;
  EventWatcher& operator=(const EventWatcher&) = delete;

  /// @param queue a small number: the stream that the event was recorded on.
  void add(std::size_t queue, std::unique_ptr<DeviceEvent> event, Then then);

 private:
  struct Entry {
    std::unique_ptr<DeviceEvent> event;
    Then then;
  };

  /// The thread shares it, so that it outlives a watcher which dies inside a function it called.
  struct State {
    std::mutex mutex; // guards all below
    std::condition_variable wakeUp;
    std::vector<std::deque<Entry>> queues;
    std::size_t outstanding = 0;
    bool stop = false;
  };

  // A slice takes 100 us or more on the fastest links, so this costs little order; asking without
  // pause would take a core from the data loader.
  static constexpr std::chrono::microseconds kPause{20};

  static void run(State& state, std::chrono::microseconds pause);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

} // namespace hvd_order
