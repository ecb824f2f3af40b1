#pragma once

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

/// Knows the times of each slice's last transfer; while recording is on, keeps all transfers.
///
/// Thread safety: every method may be called from any thread.
class Timeline final {
 public:
  void start();
  void stop();
  /// Returns the transfers recorded since the last call.
  std::vector<SliceEvent> take();
  /// Returns the last transfers of a model's slices, by slice; times are 0 where there was none.
  std::vector<SliceEvent> last(ModelId model);
  /// Forgets a model that is removed.
  void forget(ModelId model);

  void ready(SliceKey slice);
  void issued(SliceKey slice);
  void done(SliceKey slice);

 private:
  SliceEvent& current(SliceKey slice);

  std::mutex mutex_;
  bool recording_ = false;
  std::vector<std::vector<SliceEvent>> last_; // by model and slice, transfers under way as well
  std::vector<SliceEvent> finished_;
};

} // namespace hvd_order
