#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "tensorflow/op_context.h"

namespace hvd_order::tensorflow {

/// A collective operator that waits for Python to carry it out.
struct CollectiveCall {
  std::int64_t description; ///< a number that Python assigned
  std::unique_ptr<OpContext> context;
  std::vector<TensorView> inputs;
};

/// Collectives that operators have asked for, until Python fetches them. No thread of TensorFlow
/// is blocked, and none needs the GIL.
///
/// Thread safety: every method may be called from any thread.
class CollectiveCalls final {
 public:
  static CollectiveCalls& instance();

  /// Adds a call. Without an open queue, ends the call at once with an error.
  /// @param turns number of the last inputs that are handles; these only order the operators.
  void submit(std::unique_ptr<OpContext> context, std::int64_t description, std::int64_t turns);

  /// Blocks until there is a call. @return null after `close`.
  std::unique_ptr<CollectiveCall> next();

  void open();
  /// Ends the calls that have not been fetched, and all later calls, with an error.
  void close();

 private:
  std::mutex mutex_; // guards all below
  std::condition_variable wakeUp_;
  std::deque<std::unique_ptr<CollectiveCall>> calls_;
  bool open_ = false;
};

} // namespace hvd_order::tensorflow
