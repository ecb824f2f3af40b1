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

/// How much each worker may push without having been asked for more: enough to keep its line busy,
/// and no more, as nobody else may push a slice while one is on its way.
///
/// Thread safety: all methods may be called from any thread.
class PushWindows {
 public:
  explicit PushWindows(int workers) : workers_(static_cast<std::size_t>(workers)) {}

  [[nodiscard]] bool hasRoom(int worker) const;
  /// When a push of so many bytes would be here if it was admitted now, by the worker's speed so
  /// far; while that is unknown, as fast as a byte a second.
  [[nodiscard]] double expectedSeconds(int worker, ByteCount bytes) const;

  /// A push has been admitted. @return false if the worker has no room.
  bool take(int worker, ByteCount bytes, double now);
  /// It has come, or will not come.
  void giveBack(int worker, ByteCount bytes, bool came, double now);

  /// The slice wants to know when one of these workers has room again.
  void await(const std::vector<int>& workers, const std::shared_ptr<ServedSlice>& slice);
  /// The most urgent slice that waits for that worker, who has room; null if there is none.
  std::shared_ptr<ServedSlice> next(int worker);

 private:
  // A line carries one while the next one's admission is under way.
  static constexpr int kMostAdmitted = 2;

  struct Worker {
    int admitted = 0;
    ByteCount bytes = 0; // of those
    double since = 0;    // the line has been busy
    double rate = 0;     // bytes a second; 0: unknown
    std::map<std::tuple<SliceIndex, ModelId, std::uint32_t>, std::weak_ptr<ServedSlice>> waiting;
  };
  [[nodiscard]] const Worker& of(int worker) const {
    return workers_.at(static_cast<std::size_t>(worker));
  }
  Worker& of(int worker) {
    return workers_.at(static_cast<std::size_t>(worker));
  }

  mutable std::mutex mutex_; // guards what follows
  std::vector<Worker> workers_;
};

} // namespace hvd_order
