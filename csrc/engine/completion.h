#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// The tensors whose exchange is under way, the threads that wait for them, and the engine's one
/// failure.
///
/// Thread safety: every method locks `mutex_`; nothing else is called under it.
class Completion final {
 public:
  using Clock = std::chrono::steady_clock;

  void addModel(ModelId model, std::size_t tensors);
  void removeModel(ModelId model);

  /// Marks the exchange of `tensor` as under way. Repeated calls have no effect.
  /// @throws the failure, if there is one.
  void begin(TensorKey tensor);
  /// Marks the exchanges of `tensors` as ended; wakes their waiters and calls their functions.
  void complete(const std::vector<TensorKey>& tensors);

  /// Sets the failure; only the first call counts. All waiters wake with `error`.
  /// @return whether this was the first call.
  bool fail(const std::exception_ptr& error) noexcept;
  [[nodiscard]] bool failed() const;
  /// @throws the failure, if there is one.
  void check() const;

  /// Blocks until the exchange of `tensor` has ended. Returns at once if it is not under way.
  /// @return whether it ended before the deadline. @throws the failure, if there is one.
  bool wait(TensorKey tensor, Clock::time_point deadline);

  /// Called with null when the exchange has ended, else with the failure. Called under locks, so
  /// it may only pass the result on.
  using Then = std::function<void(const std::exception_ptr& error)>;
  /// Calls `then` once: when the exchange of `tensor` has ended, or with the failure; at once if
  /// the exchange is not under way. If the model is removed before, `then` is never called.
  void then(TensorKey tensor, Then then);

  /// Returns for each tensor of the model 1 if its exchange is under way, else 0.
  /// @throws the failure, if there is one.
  [[nodiscard]] std::vector<std::uint8_t> pending(ModelId model) const;
  [[nodiscard]] bool isPending(TensorKey tensor) const;
  [[nodiscard]] std::size_t pendingCount() const;

 private:
  struct Waiter {
    TensorKey tensor;
    std::condition_variable ready;
  };

  [[nodiscard]] bool isPendingLocked(TensorKey tensor) const;

  mutable std::mutex mutex_;
  std::vector<std::vector<std::uint8_t>> pending_; // by model and tensor
  std::size_t pendingCount_ = 0;
  std::vector<Waiter*> waiters_; // linear search: more than one training thread is rare
  std::vector<std::vector<std::vector<Then>>> listeners_; // by model and tensor
  std::exception_ptr failure_;
};

} // namespace hvd_order
