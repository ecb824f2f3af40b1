#include "engine/completion.h"

#include <algorithm>

#include "base/error.h"

namespace hvd_order {

void Completion::addModel(ModelId model, std::size_t tensors) {
  const std::scoped_lock lock(mutex_);
  if (pending_.size() <= model) {
    pending_.resize(model + 1);
  }
  pending_[model].assign(tensors, 0);
}

void Completion::removeModel(ModelId model) {
  const std::scoped_lock lock(mutex_);
  pending_.at(model).clear();
}

bool Completion::begin(TensorKey tensor) {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  std::uint8_t& pending = pending_.at(tensor.model).at(tensor.tensor);
  if (pending == 0) {
    pending = 1;
    ++pendingCount_;
  }
  return pendingCount_ == 1;
}

void Completion::complete(const std::vector<TensorKey>& tensors) {
  const std::scoped_lock lock(mutex_);
  for (const TensorKey tensor : tensors) {
    pending_.at(tensor.model).at(tensor.tensor) = 0;
    --pendingCount_;
    for (Waiter* waiter : waiters_) {
      if (waiter->tensor == tensor) {
        waiter->ready.notify_one();
      }
    }
  }
}

bool Completion::fail(std::exception_ptr error) noexcept {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    return false;
  }
  failure_ = std::move(error);
  for (Waiter* waiter : waiters_) {
    waiter->ready.notify_one();
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
  // A waiter may wake only after its model was removed.
  return tensor.model < pending_.size() && tensor.tensor < pending_[tensor.model].size() &&
      pending_[tensor.model][tensor.tensor] != 0;
}

} // namespace hvd_order
