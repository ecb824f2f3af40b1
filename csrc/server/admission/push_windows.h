#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/types.h"

namespace hvd_order {

class ServedSlice;

/// How many pushes of each worker, or sums of each helper, may be on their way: enough to keep a
/// line busy, and no more, as nobody else may push a slice meanwhile.
///
/// Thread safety: all methods may be called from any thread.
class PushWindows {
 public:
  /// When a push of so many bytes would be here if it was admitted now, by the sender's speed so
  /// far; while that is unknown, as fast as a byte a second.
  [[nodiscard]] double expectedSeconds(int sender, ByteCount bytes) const;

  /// A push has been admitted. @return false if the sender has no room.
  bool take(int sender, ByteCount bytes, double now);
  /// It has come, or will not come.
  void giveBack(int sender, ByteCount bytes, bool came, double now);

  /// The slice wants to know when one of these has room again.
  void await(const std::vector<int>& senders, const std::shared_ptr<ServedSlice>& slice);
  /// The most urgent slice that waits for that sender, who has room; null if there is none.
  std::shared_ptr<ServedSlice> next(int sender);

 private:
  // A line carries one while the next one's admission is under way.
  static constexpr int kMostAdmitted = 2;

  struct Sender {
    int admitted = 0;
    ByteCount bytes = 0; // of those
    double since = 0;    // the line has been busy
    double rate = 0;     // bytes a second; 0: unknown
    std::map<std::tuple<SliceIndex, ModelId, std::uint32_t>, std::weak_ptr<ServedSlice>> waiting;
  };

  mutable std::mutex mutex_;      // guards what follows
  std::map<int, Sender> senders_; // by rank, or server
};

} // namespace hvd_order
