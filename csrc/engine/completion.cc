#include "engine/completion.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

// One flag for each tensor, and one failure for the engine.
//
// A tensor's flag is set when its exchange begins and cleared when it has ended. A reader waits in
// one of two ways: `wait` blocks its thread on a condition variable of its own, so that the end of
// a tensor wakes only the threads that wait for it; `then` leaves a function.
//
// The first failure is final. It wakes all waiters, goes to all functions, and is thrown by every
// later call that would begin or await an exchange. Flags stay as they are, because slices in
// flight may still end.
//
// Invariants: pendingCount_ is the number of flags that are set. A function is called exactly once
// (unless its model is removed), and never under mutex_: it is moved out of the list first.

namespace hvd_order {

void Completion::addModel(ModelId model, std::size_t tensors) {
  const std::scoped_lock lock(mutex_);
  if (pending_.size() <= model) {
    pending_.resize(model + 1);
    listeners_.resize(model + 1);
  }
  pending_[model].assign(tensors, 0);
  listeners_[model].assign(tensors, {});
}

void Completion::removeModel(ModelId model) {
  const std::scoped_lock lock(mutex_);
  pending_.at(model).clear();
  listeners_.at(model).clear();
}

void Completion::begin(TensorKey tensor) {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  std::uint8_t& pending = pending_.at(tensor.model).at(tensor.tensor);
  if (pending == 0) {
    pending = 1;
    ++pendingCount_;
  }
}

void Completion::complete(const std::vector<TensorKey>& tensors) {
  std::vector<Then> told;
  std::unique_lock lock(mutex_);
  for (const TensorKey tensor : tensors) {
    pending_.at(tensor.model).at(tensor.tensor) = 0;
    --pendingCount_;
    for (Waiter* waiter : waiters_) {
      if (waiter->tensor == tensor) {
        waiter->ready.notify_one();
      }
    }
    std::vector<Then>& listeners = listeners_[tensor.model][tensor.tensor];
    std::move(listeners.begin(), listeners.end(), std::back_inserter(told));
    listeners.clear();
  }
  lock.unlock();
  for (const Then& then : told) {
    then(nullptr);
  }
}

bool Completion::fail(const std::exception_ptr& error) noexcept {
  std::vector<Then> told;
  std::unique_lock lock(mutex_);
  if (failure_) {
    return false;
  }
  failure_ = error;
  for (Waiter* waiter : waiters_) {
    waiter->ready.notify_one();
  }
  for (auto& model : listeners_) {
    for (std::vector<Then>& listeners : model) { // keep the places: slices in flight may still end
      std::move(listeners.begin(), listeners.end(), std::back_inserter(told));
      listeners.clear();
    }
  }
  lock.unlock();
  for (const Then& then : told) {
    then(error);
  }
  return true;
}

bool Completion::failed() const {
  const std::scoped_lock lock(mutex_);
  return failure_ != nullptr;
}

void Completion::check() const {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

bool Completion::wait(TensorKey tensor, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  if (!failure_ && !isPendingLocked(tensor)) {
    return true;
  }
  Waiter waiter{tensor, {}};
  waiters_.push_back(&waiter);
  const bool ended = waiter.ready.wait_until(
      lock, deadline, [&] { return failure_ != nullptr || !isPendingLocked(tensor); });
  waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &waiter));
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  return ended;
}

void Completion::then(TensorKey tensor, Then then) {
  std::unique_lock lock(mutex_);
  if (!failure_ && isPendingLocked(tensor)) {
    listeners_[tensor.model][tensor.tensor].push_back(std::move(then));
    return;
  }
  const std::exception_ptr failure = failure_;
  lock.unlock();
  then(failure);
}

std::vector<std::uint8_t> Completion::pending(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  return pending_.at(model);
}

bool Completion::isPending(TensorKey tensor) const {
  const std::scoped_lock lock(mutex_);
  return isPendingLocked(tensor);
}

std::size_t Completion::pendingCount() const {
  const std::scoped_lock lock(mutex_);
  return pendingCount_;
}

bool Completion::isPendingLocked(TensorKey tensor) const {
  // A waiter may wake after its model was removed.
  return tensor.model < pending_.size() && tensor.tensor < pending_[tensor.model].size() &&
      pending_[tensor.model][tensor.tensor] != 0;
}

} // namespace hvd_order
