#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

// Streams and events with CUDA's rules, on threads of the host.
//
// A stream is a thread with a queue. A task that throws makes its stream fail for ever, as an error
// of a CUDA kernel does. An event remembers a place in a stream's queue: a wait takes the place at
// the time of the call, so that a later record does not move it, and an event that was never
// recorded is no wait and has happened.
namespace test_device {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

/// How late tasks start. Delays show a missing wait: whoever does not wait reads what was before.
struct Delays {
  std::chrono::microseconds constant{0};
  std::chrono::microseconds random{0}; ///< at most; uniform
  std::chrono::microseconds launch{0}; ///< from the call that enqueues a task to its start
};

class Stream {
 public:
  explicit Stream(std::int64_t id, unsigned seed);

  /// @return the number of the task; the first has 1.
  std::uint64_t enqueue(Task task);
  [[nodiscard]] std::uint64_t enqueued();
  /// @throws the error of a task.
  bool reached(std::uint64_t number);
  /// Blocks until the task has run. @throws the error of a task.
  void await(std::uint64_t number);
  void setDelays(Delays delays);

 private:
  struct Entry {
    Task task;
    Clock::time_point enqueued;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t done_ = 0;
  std::exception_ptr error_;
  Delays delays_;
  std::mt19937 random_;
};

struct Event {
  Stream* stream = nullptr; ///< null: never recorded
  std::uint64_t number = 0;
};

/// The one device. Streams live as long as the process.
class Device {
 public:
  static constexpr std::int64_t kPool = 32; ///< streams 1 to 32 are the pool

  static Device& get();

  Stream& stream(std::int64_t id);
  std::int64_t newStream();
  std::int64_t poolStream();
  void synchronize();
  void setDelays(std::int64_t stream, Delays delays); ///< stream -1: all, and those to come
  void seed(unsigned value);

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::unique_ptr<Stream>> streams_;
  std::int64_t next_ = kPool + 1;
  std::atomic<std::int64_t> inPool_ = 0;
  Delays delays_;
  unsigned seed_ = 0;
};

std::int64_t& currentStream(); ///< of this thread

/// What the program has asked for since the process began.
struct Counts {
  std::atomic<int> eventsCreated = 0;
  std::atomic<int> poolStreamsTaken = 0;
  std::atomic<int> kernelLaunches = 0;
};
Counts& counts();

/// Stops a stream until `openGates`: whatever waits for it on the host does not return.
void closeGate(std::int64_t stream);
void openGates();

void record(Event& event, std::int64_t stream);
void wait(const Event& event, std::int64_t stream);
bool query(const Event& event);
void synchronize(const Event& event);

} // namespace test_device
