#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// Nanoseconds of the steady clock; on Linux the same as Python's time.monotonic_ns.
using TimeNs = std::int64_t;

inline TimeNs nowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Times of one transfer of one slice.
struct SliceEvent {
  SliceKey slice;
  TimeNs readyNs;  ///< all that it waits for was ready or done on this rank
  TimeNs issuedNs; ///< handed to the transport
  TimeNs doneNs;   ///< the transport reported it done
};

/// Records the times of slices while recording is on. Costs one flag test while it is off.
///
/// Thread safety: every method may be called from any thread.
class Timeline final {
 public:
  void start();
  void stop();
  /// Returns the transfers recorded since the last call.
  std::vector<SliceEvent> take();

  void ready(SliceKey slice);
  void issued(SliceKey slice);
  void done(SliceKey slice);

 private:
  SliceEvent& current(SliceKey slice);

  std::mutex mutex_;
  std::atomic<bool> recording_ = false;
  std::vector<std::vector<SliceEvent>> current_; // by model and slice: the transfer under way
  std::vector<SliceEvent> finished_;
};

} // namespace hvd_order
