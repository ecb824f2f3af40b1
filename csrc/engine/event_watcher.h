#pragma once

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
/// thread asks; it sleeps while nothing is outstanding. Events of one queue happen in the order in which they
/// were recorded (they are of one stream), so only the oldest is asked for.
///
/// Thread safety: `add` may be called from any thread.
class EventWatcher final {
 public:
  /// Called with null when the event has happened, else with the device's error.
  using Then = std::function<void(std::exception_ptr error)>;

  EventWatcher();
  /// Drops what is outstanding: its functions are not called.
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

  void run();

  std::mutex mutex_;
  std::condition_variable wakeUp_;
  std::vector<std::deque<Entry>> queues_;
  std::size_t outstanding_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

} // namespace hvd_order
