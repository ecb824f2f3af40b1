#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// Limits how many pushes of each worker, or sums of each helper, are on their way. The limit
/// keeps a connection busy and is no larger, because no other worker may push a slice whose push is
/// on its way.
///
/// Thread safety: all methods may be called from any thread.
class PushWindows {
 public:
  /// A slice that waits until a sender has room.
  class WaitingSlice {
   public:
    WaitingSlice() = default;
    WaitingSlice(const WaitingSlice&) = delete;
    WaitingSlice& operator=(const WaitingSlice&) = delete;
    virtual ~WaitingSlice() = default;
    /// A sender that this slice waits for has room for a push.
    virtual void admit() = 0;
  };
  /// Identifies a waiting slice; the lowest goes first.
  using Key = std::tuple<SliceIndex, ModelId, std::uint32_t>;

  /// Seconds until a push of `bytes` bytes would arrive if it was admitted now, by the sender's
  /// measured speed. While that speed is unknown, one byte a second is assumed.
  [[nodiscard]] double expectedSeconds(int sender, ByteCount bytes) const;

  /// Counts an admitted push. @return false if the sender has no room.
  bool take(int sender, ByteCount bytes, double now);
  /// Ends a push that `take` has counted: it has arrived (`came`), or will not arrive.
  void giveBack(int sender, ByteCount bytes, bool came, double now);

  /// Registers the slice to be returned by `next` when one of these senders has room again.
  void await(
      const std::vector<int>& senders,
      const Key& key,
      const std::shared_ptr<WaitingSlice>& slice);
  /// Removes and returns the most urgent slice that waits for this sender. @return null if the
  /// sender has no room or no slice waits.
  std::shared_ptr<WaitingSlice> next(int sender);

 private:
  // The connection carries one push while the next one is being admitted.
  static constexpr int kMostAdmitted = 2;

  struct Sender {
    int admitted = 0;
    ByteCount bytes = 0; // of the admitted pushes
    double since = 0;    // start of the current measurement of `rate`
    double rate = 0;     // bytes a second; 0: unknown
    std::map<Key, std::weak_ptr<WaitingSlice>> waiting;
  };

  mutable std::mutex mutex_;      // guards `senders_`
  std::map<int, Sender> senders_; // by rank or by server
};

} // namespace hvd_order
