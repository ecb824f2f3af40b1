#include "engine/completion.h"

#include <algorithm>

#include "base/error.h"

// Counts of exchanges for each tensor, and one failure for the engine.
//
// A tensor's exchange begins when its gradient is announced and ends when its sum has arrived.
// Whoever waits remembers the number of the newest exchange, so that the end of an earlier one is
// not taken for it: on a device, the hook of step n + 1 may run while step n is still in flight.
//
// A reader waits in one of two ways: `wait` blocks its thread on a condition variable of its own,
// so that a tensor wakes only the threads that wait for it; `then` leaves a function.
//
// The first failure is final. It wakes all waiters, goes to all functions, and is thrown by every
// later call that would begin or await an exchange. Counts stay as they are, because slices in
// flight may still end.
//
// Invariants: pendingCount_ is the sum of announced - ended. A function is called exactly once
// (unless its model is removed), and never under mutex_: it is moved out of the list first.

namespace hvd_order {

void Completion::addModel(ModelId model, std::size_t tensors) {
  const std::scoped_lock lock(mutex_);
  if (models_.size() <= model) {
    models_.resize(model + 1);
    pendingOf_.resize(model + 1, 0);
  }
  models_[model] = std::vector<TensorExchanges>(tensors);
}

void Completion::removeModel(ModelId model) {
  const std::scoped_lock lock(mutex_);
  models_.at(model).clear();
}

void Completion::announce(TensorKey tensor) {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  begin(tensor);
}

void Completion::ready(TensorKey tensor, Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  TensorExchanges& it = models_.at(tensor.model).at(tensor.tensor);
  if (it.ready == it.announced) {
    begin(tensor);
  }
  ++it.ready;
  it.readyAt = now;
}

void Completion::computed(TensorKey tensor) {
  const auto now = Clock::now();
  const std::scoped_lock lock(mutex_);
  if (find(tensor) != nullptr) {
    models_[tensor.model][tensor.tensor].readyAt = now;
  }
}

void Completion::begin(TensorKey tensor) {
  ++models_.at(tensor.model).at(tensor.tensor).announced;
  ++pendingOf_[tensor.model];
  ++pendingCount_;
}

void Completion::enqueue(const std::vector<TensorKey>& tensors) {
  const std::scoped_lock lock(mutex_);
  for (const TensorKey tensor : tensors) {
    ++models_.at(tensor.model).at(tensor.tensor).enqueued;
    notify(tensor);
  }
}

void Completion::complete(const std::vector<TensorKey>& tensors) {
  std::vector<Then> told;
  std::unique_lock lock(mutex_);
  for (const TensorKey tensor : tensors) {
    TensorExchanges& it = models_.at(tensor.model).at(tensor.tensor);
    const Number ended = ++it.ended;
    it.enqueued = std::max(it.enqueued, ended);
    --pendingOf_[tensor.model];
    --pendingCount_;
    notify(tensor);
    std::erase_if(it.listeners, [&](EndListener& listener) {
      const bool due = listener.exchange <= ended;
      if (due) {
        told.push_back(std::move(listener.then));
      }
      return due;
    });
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
  for (WaitingThread* waiter : waiters_) {
    waiter->moved.notify_one();
  }
  for (auto& model : models_) {
    for (TensorExchanges& tensor : model) {
      for (EndListener& listener : tensor.listeners) {
        told.push_back(std::move(listener.then));
      }
      tensor.listeners.clear();
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

bool Completion::wait(TensorKey tensor, Clock::time_point deadline, Stage stage) {
  std::unique_lock lock(mutex_);
  const TensorExchanges* found = find(tensor);
  const Number exchange = found == nullptr ? 0 : found->announced;
  if (!failure_ && reached(tensor, exchange, stage)) {
    return true;
  }
  WaitingThread waiter{tensor, {}};
  waiters_.push_back(&waiter);
  const bool came = waiter.moved.wait_until(
      lock, deadline, [&] { return failure_ != nullptr || reached(tensor, exchange, stage); });
  waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &waiter));
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  return came;
}

void Completion::then(TensorKey tensor, Then then) {
  std::unique_lock lock(mutex_);
  const TensorExchanges* found = find(tensor);
  if (!failure_ && found != nullptr && found->ended < found->announced) {
    TensorExchanges& it = models_[tensor.model][tensor.tensor];
    it.listeners.push_back({it.announced, std::move(then)});
    return;
  }
  const std::exception_ptr failure = failure_;
  lock.unlock();
  then(failure);
}

std::vector<std::uint8_t> Completion::stages(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  const std::vector<TensorExchanges>& tensors = models_.at(model);
  std::vector<std::uint8_t> stages(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorExchanges& it = tensors[i];
    const Stage stage = it.ended == it.announced ? Stage::kEnded
        : it.enqueued == it.announced            ? Stage::kEnqueued
                                                 : Stage::kUnderWay;
    stages[i] = static_cast<std::uint8_t>(stage);
  }
  return stages;
}

std::vector<Completion::Clock::time_point> Completion::readyTimes(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  std::vector<Clock::time_point> times;
  for (const TensorExchanges& tensor : models_.at(model)) {
    times.push_back(tensor.readyAt);
  }
  return times;
}

bool Completion::isPending(TensorKey tensor) const {
  const std::scoped_lock lock(mutex_);
  const TensorExchanges* found = find(tensor);
  return found != nullptr && found->ended < found->announced;
}

bool Completion::isEnqueued(TensorKey tensor) const {
  const std::scoped_lock lock(mutex_);
  const TensorExchanges* found = find(tensor);
  return found != nullptr && found->ended < found->enqueued;
}

std::vector<ModelId> Completion::pendingModels() const {
  const std::scoped_lock lock(mutex_);
  std::vector<ModelId> models;
  for (ModelId model = 0; model < pendingOf_.size(); ++model) {
    if (pendingOf_[model] > 0) {
      models.push_back(model);
    }
  }
  return models;
}

std::size_t Completion::pendingCount() const {
  const std::scoped_lock lock(mutex_);
  return pendingCount_;
}

// The functions below are called under the lock.

// A waiter may wake after its model was removed.
const Completion::TensorExchanges* Completion::find(TensorKey tensor) const {
  const bool known = tensor.model < models_.size() && tensor.tensor < models_[tensor.model].size();
  return known ? &models_[tensor.model][tensor.tensor] : nullptr;
}

void Completion::notify(TensorKey tensor) {
  for (WaitingThread* waiter : waiters_) {
    if (waiter->tensor == tensor) {
      waiter->moved.notify_one();
    }
  }
}

bool Completion::reached(TensorKey tensor, Number exchange, Stage stage) const {
  const TensorExchanges* found = find(tensor);
  return found == nullptr ||
      (stage == Stage::kEnqueued ? found->enqueued : found->ended) >= exchange;
}

} // namespace hvd_order
