#include "engine/handover.h"

#include <algorithm>
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

// Takes the sums of zeros.
class Nobody final : public Handover::Taker {
 public:
  void receive(const std::byte* /*sum*/, std::size_t /*sizeBytes*/) override {}
  void finish(const std::exception_ptr& /*error*/) override {}
};

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
    begin(slots_[slot]);
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
  listen(slot, tensor);
}

void Handover::listen(std::size_t slot, TensorId tensor) {
  engine_->then({model_, tensor}, [weak = weak_from_this(), slot](const std::exception_ptr& e) {
    if (const auto self = weak.lock()) {
      self->settled(slot, e);
    }
  });
}

// Called under the lock.
void Handover::begin(Slot& slot) {
  slot.posted = true;
  ++slot.rounds;
  if (slot.rounds > rounds_) {
    rounds_ = slot.rounds;
    changed_.notify_all();
  }
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
  if (error) {
    slot.wanted = slot.rounds; // nothing can be sent any more
  }
  const bool again = slot.rounds < slot.wanted && !closed_;
  if (again) {
    slot.taker = std::make_unique<Nobody>();
    begin(slot);
  }
  lock.unlock();
  taker->finish(error);
  taker.reset();
  if (again) {
    try {
      sendZeros(settled.slot);
    } catch (...) { // NOLINT(bugprone-empty-catch): whoever waits for these sums is told by others
    }
  }
  lock.lock();
  changed_.notify_all();
}

void Handover::standIn(std::uint64_t round) {
  std::vector<std::size_t> idle;
  std::vector<std::size_t> untaken;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) {
      std::rethrow_exception(closedError());
    }
    if (round > rounds_) {
      rounds_ = round;
      changed_.notify_all();
    }
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      Slot& own = slots_[slot];
      own.wanted = std::max(own.wanted, round);
      if (!own.posted && own.rounds < own.wanted) {
        own.taker = std::make_unique<Nobody>();
        begin(own);
        idle.push_back(slot);
      } else if (own.posted && !own.taker) {
        own.taker = std::make_unique<Nobody>();
        untaken.push_back(slot);
      }
    }
  }
  for (const std::size_t slot : untaken) {
    listen(slot, slots_[slot].place.tensor);
  }
  std::exception_ptr error;
  for (const std::size_t slot : idle) {
    try {
      sendZeros(slot);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

// The slot has begun, and nobody takes its sum.
void Handover::sendZeros(std::size_t slot) {
  const Place& place = slots_[slot].place; // never moves
  std::memset(place.memory, 0, place.sizeBytes);
  try {
    engine_->tensorReady({model_, place.tensor});
  } catch (...) { // the engine has failed
    const std::scoped_lock lock(mutex_);
    slots_[slot].taker.reset();
    slots_[slot].posted = false;
    slots_[slot].wanted = slots_[slot].rounds;
    throw;
  }
  listen(slot, place.tensor);
}

std::uint64_t Handover::rounds() const {
  const std::scoped_lock lock(mutex_);
  return rounds_;
}

std::optional<std::uint64_t> Handover::waitForRound(std::uint64_t known) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || rounds_ > known; });
  return closed_ ? std::nullopt : std::optional(rounds_);
}

void Handover::waitUntilIdle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return closed_ || std::ranges::none_of(slots_, [](const Slot& slot) { return slot.posted; });
  });
}

void Handover::close() noexcept {
  std::thread thread;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    wakeUp_.notify_one();
    changed_.notify_all();
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
