#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "tensorflow/op_context.h"

namespace hvd_order::tensorflow {

/// A collective operator that waits for whoever carries collectives out.
struct CollectiveCall {
  std::int64_t description; ///< a number that Python gave out
  std::unique_ptr<OpContext> context;
  std::vector<TensorView> inputs;
};

/// Collectives that operators have asked for, until Python fetches them: so no thread of TensorFlow
/// is blocked, and none needs Python's lock.
///
/// Thread safety: every method may be called from any thread.
class CollectiveCalls final {
 public:
  static CollectiveCalls& instance();

  /// Ends at once with an error while nobody serves.
  /// @param turns how many of the last inputs are handles, which are there for the order alone.
  void submit(std::unique_ptr<OpContext> context, std::int64_t description, std::int64_t turns);

  /// Blocks until there is a call. @return null after `close`.
  std::unique_ptr<CollectiveCall> next();

  void open();
  /// Ends what has not been fetched, and what comes from now on, with an error.
  void close();

 private:
  std::mutex mutex_; // guards all below
  std::condition_variable wakeUp_;
  std::deque<std::unique_ptr<CollectiveCall>> calls_;
  bool open_ = false;
};

} // namespace hvd_order::tensorflow
