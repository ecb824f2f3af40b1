#include "engine/handover.h"

#include <cstring>
#include <utility>

#include "base/error.h"

// The engine tells under its locks that a tensor has settled, so that moment only queues the slot;
// the thread of this object calls the taker. Nothing of the engine is called under mutex_.

namespace hvd_order {

namespace {

std::exception_ptr closedError() {
  return std::make_exception_ptr(
      InvalidUsage("the exchange of these gradients has ended; call init() and trace again"));
}

} // namespace

std::shared_ptr<Handover>
Handover::create(std::shared_ptr<Engine> engine, ModelId model, std::vector<Place> places) {
  std::shared_ptr<Handover> made(new Handover(std::move(engine), model, std::move(places)));
  made->thread_ = std::thread([made] { made->run(); });
  return made;
}

Handover::Handover(std::shared_ptr<Engine> engine, ModelId model, std::vector<Place> places)
    : engine_(std::move(engine)), model_(model) {
  for (Place& place : places) {
    slots_.emplace_back().place = std::move(place);
  }
}

void Handover::post(std::size_t slot, const void* gradient, std::size_t sizeBytes) {
  const Place* place = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) {
      std::rethrow_exception(closedError());
    }
    if (slot >= slots_.size()) {
      throw InvalidUsage(concat("there is no gradient number ", slot));
    }
    place = &slots_[slot].place; // never moves
    if (sizeBytes != place->sizeBytes) {
      throw InvalidUsage(concat(
          "the gradient of '", place->name, "' has ", sizeBytes, " bytes, expected ",
          place->sizeBytes));
    }
    if (slots_[slot].posted) {
      throw InvalidUsage(concat(
          "the gradient of '", place->name,
          "' came again before its sum was taken: the last step was not finished"));
    }
    slots_[slot].posted = true;
    ++posts_;
  }
  std::memcpy(place->memory, gradient, sizeBytes);
  engine_->tensorReady({model_, place->tensor});
}

void Handover::take(std::size_t slot, std::unique_ptr<Taker> taker) {
  TensorId tensor = 0;
  try {
    const std::scoped_lock lock(mutex_);
    tensor = accept(slot, taker);
  } catch (...) {
    taker->finish(std::current_exception());
    return;
  }
  engine_->then({model_, tensor}, [weak = weak_from_this(), slot](const std::exception_ptr& e) {
    if (const auto self = weak.lock()) {
      self->settled(slot, e);
    }
  });
}

// Called under the lock. Takes the taker, or throws and leaves it.
TensorId Handover::accept(std::size_t slot, std::unique_ptr<Taker>& taker) {
  if (closed_) {
    std::rethrow_exception(closedError());
  }
  if (slot >= slots_.size()) {
    throw InvalidUsage(concat("there is no gradient number ", slot));
  }
  Slot& own = slots_[slot];
  if (!own.posted || own.taker) {
    throw InvalidUsage(concat(
        "the sum of '", own.place.name, "' was asked for ",
        own.posted ? "twice" : "before its gradient came"));
  }
  own.taker = std::move(taker);
  return own.place.tensor;
}

void Handover::settled(std::size_t slot, const std::exception_ptr& error) {
  const std::scoped_lock lock(mutex_);
  settled_.push_back({slot, error});
  wakeUp_.notify_one();
}

void Handover::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wakeUp_.wait(lock, [this] { return closed_ || !settled_.empty(); });
    if (settled_.empty()) {
      break;
    }
    const Settled next = std::move(settled_.front());
    settled_.pop_front();
    deliver(lock, next);
  }
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    deliver(lock, {slot, closedError()});
  }
}

// Called under the lock; lets go of it to call the taker.
void Handover::deliver(std::unique_lock<std::mutex>& lock, const Settled& settled) {
  Slot& slot = slots_[settled.slot];
  std::unique_ptr<Taker> taker = std::exchange(slot.taker, nullptr);
  if (!taker) {
    return; // `close` has come first
  }
  std::exception_ptr error = settled.error;
  lock.unlock();
  if (!error) {
    try {
      taker->receive(slot.place.memory, slot.place.sizeBytes);
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock.lock();
  slot.posted = false;
  lock.unlock();
  taker->finish(error);
  taker.reset();
  lock.lock();
}

void Handover::close() noexcept {
  std::thread thread;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    wakeUp_.notify_one();
    thread = std::exchange(thread_, std::thread());
  }
  if (thread.joinable()) {
    thread.join();
  }
}

std::uint64_t Handover::posts() const {
  const std::scoped_lock lock(mutex_);
  return posts_;
}

} // namespace hvd_order
