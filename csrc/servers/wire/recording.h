#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace hvd_order {

/// Times of a slice's content that a connection has received, in nanoseconds of the steady clock:
/// the processes of one host have the same clock.
struct ReceivedTimes {
  std::uint64_t sizeBytes; ///< of the payload
  std::int64_t beforeNs;   ///< the frame before, of any kind, was complete
  std::int64_t freeNs;     ///< the receiving thread had handled that frame, and waited for this one
  std::int64_t beganNs;    ///< the thread had the header
  std::int64_t cameNs;     ///< the thread had the payload
  std::int64_t handledNs;  ///< the thread was done with it
  std::uint64_t thread;    ///< threadNumber()
};

/// Times of an update of one slice, or of a sum where servers only sum; as above.
struct UpdateTimes {
  std::uint64_t sizeBytes; ///< of the slice
  std::int64_t beginNs;
  std::int64_t endNs;
  std::uint64_t thread; ///< same as that of the frame that made the update due
};

inline std::int64_t steadyNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
inline double steadySeconds() {
  return static_cast<double>(steadyNs()) * 1e-9;
}

/// Tells the threads of one process apart.
inline std::uint64_t threadNumber() {
  return std::hash<std::thread::id>{}(std::this_thread::get_id());
}

/// Keeps times while recording is on, for a profile. Costs one flag test while it is off.
///
/// Thread safety: all methods may be called from any thread.
template <typename Times>
class Recording final {
 public:
  void turn(bool on) {
    on_.store(on, std::memory_order_relaxed);
  }
  [[nodiscard]] bool isOn() const {
    return on_.load(std::memory_order_relaxed);
  }
  /// Drops the times if too many wait to be taken.
  void add(const Times& times) {
    const std::scoped_lock lock(mutex_);
    if (kept_.size() < kMost) {
      kept_.push_back(times);
    }
  }
  /// Returns the times recorded since the last call.
  std::vector<Times> take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(kept_, {});
  }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 18; // a server's fit in one frame, as JSON

  std::atomic<bool> on_ = false;
  std::mutex mutex_;
  std::vector<Times> kept_;
};

} // namespace hvd_order
