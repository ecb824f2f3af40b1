#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// Which tensors are still being exchanged, who waits for them, and the engine's one failure.
///
/// Thread safety: every method locks `mutex_`; nothing else is called under it.
class Completion final {
 public:
  using Clock = std::chrono::steady_clock;

  void addModel(ModelId model, std::size_t tensors);
  void removeModel(ModelId model);

  /// The exchange of `tensor` has begun; it may have been said before.
  /// @return whether nothing else is under way. @throws the failure, if there is one.
  bool begin(TensorKey tensor);
  void complete(const std::vector<TensorKey>& tensors);

  /// The first call decides; all waiters wake with `error`. @return whether it was the first.
  bool fail(const std::exception_ptr& error) noexcept;
  [[nodiscard]] bool failed() const;
  /// @throws the failure, if there is one.
  void check() const;

  /// Blocks until the exchange of `tensor` has ended; returns at once if none is under way.
  /// @return whether it ended before the deadline. @throws the failure, if there is one.
  bool wait(TensorKey tensor, Clock::time_point deadline);

  /// Null: the exchange has ended; else the failure. Called under locks: it may only hand on.
  using Then = std::function<void(const std::exception_ptr& error)>;
  /// Calls `then` once, when the exchange of `tensor` has ended or with the failure; at once if it
  /// is no longer under way. Never, if the model is removed before.
  void then(TensorKey tensor, Then then);

  /// For each tensor of the model, 1 while it is being exchanged. @throws the failure, if any.
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
  std::vector<Waiter*> waiters_; // linear search: hardly ever more than one thread trains
  std::vector<std::vector<std::vector<Then>>> listeners_; // as pending_
  std::exception_ptr failure_;
};

} // namespace hvd_order
