#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace hvd_order {

/// Starts the collectives of one process group in the order in which they were announced, however
/// late each of them can start: all ranks must call them in the same order.
///
/// Thread safety: any thread.
class Lane final {
 public:
  using Start = std::function<void()>; ///< throws nothing

  /// @return the collective's place in the order.
  std::uint64_t announce();
  /// Calls `start` once all that were announced earlier have been started; here, or on the thread
  /// that starts the last of these. What will not take place starts with an empty function.
  void start(std::uint64_t place, Start start);

 private:
  std::mutex mutex_; // guards what follows
  std::uint64_t announced_ = 0;
  std::uint64_t next_ = 0;
  bool starting_ = false; // a thread is in the loop of `start`
  std::map<std::uint64_t, Start> ready_;
};

} // namespace hvd_order
