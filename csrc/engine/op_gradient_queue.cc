#include "engine/op_gradient_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/thread_name.h"

// A position is a small state machine: idle, posted, and posted with a taker.
//
// `post` copies the gradient and marks it ready in the engine. `take` leaves a taker and listens
// for the end of the exchange. The engine reports that end under its own locks, so `ended` only
// queues the position; the thread of this object calls the taker. `finish` is called after the
// position is idle again, so the taker may let the framework post the next gradient at once.
//
// Ranks need equally many posts of each position. `standIn` raises the number that is `wanted`. An
// idle position that has fewer posts sends zeros with a taker that drops the sum; a position under
// way sends its zeros from `deliver`, one pass after the other.
//
// In a split layout the squares are one more position, behind the gradients, that nobody posts or
// takes: they follow the passes by themselves. No gradient of a pass may be ready before the
// squares of the pass before are done (scheduler.cc). One that comes earlier is held; it is
// announced, so that its end can be listened for meanwhile.
//
// Invariants: a position has a taker only while it is posted; a taker given to `take` is finished
// exactly once, at the latest by `close`; the engine is never called under mutex_, and no taker is
// either.

namespace hvd_order {

namespace {

std::exception_ptr closedError() {
  return std::make_exception_ptr(
      InvalidUsage("the exchange of these gradients has ended; call init() and trace again"));
}

// Drops the sums of zeros, and sums that are not taken.
class Nobody final : public OpGradientQueue::Taker {
 public:
  void receive(const std::byte* /*sum*/, std::size_t /*sizeBytes*/) override {}
  void finish(const std::exception_ptr& /*error*/) override {}
};

} // namespace

std::shared_ptr<OpGradientQueue> OpGradientQueue::create(
    std::shared_ptr<Engine> engine,
    ModelId model,
    std::vector<Place> places,
    std::optional<TensorId> squares) {
  std::shared_ptr<OpGradientQueue> made(
      new OpGradientQueue(std::move(engine), model, std::move(places), squares));
  made->thread_ = std::thread([made] { made->run(); });
  return made;
}

OpGradientQueue::OpGradientQueue(
    std::shared_ptr<Engine> engine,
    ModelId model,
    std::vector<Place> places,
    std::optional<TensorId> squares)
    : engine_(std::move(engine)), model_(model), gradients_(places.size()) {
  if (squares) {
    places.push_back({*squares, nullptr, 0, "the squares"});
  }
  for (Place& place : places) {
    positions_.emplace_back().place = std::move(place);
  }
}

void OpGradientQueue::post(std::size_t position, const void* gradient, std::size_t sizeBytes) {
  const Place* place = nullptr;
  bool withSquares = false;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) {
      std::rethrow_exception(closedError());
    }
    if (position >= gradients_) {
      throw InvalidUsage(concat("there is no gradient number ", position));
    }
    place = &positions_[position].place; // never moves
    if (sizeBytes != place->sizeBytes) {
      throw InvalidUsage(concat(
          "the gradient of '", place->name, "' has ", sizeBytes, " bytes, expected ",
          place->sizeBytes));
    }
    if (positions_[position].posted) {
      throw InvalidUsage(concat(
          "the gradient of '", place->name,
          "' came again before its sum was taken: the last step was not finished"));
    }
    begin(positions_[position], nullptr);
    ++posts_;
    withSquares = beginSquares();
  }
  std::memcpy(place->memory, gradient, sizeBytes);
  try {
    if (withSquares) {
      sendZeros(gradients_);
    }
    send(position);
  } catch (...) { // the engine has failed: no sum will come, and nobody shall wait for one
    const std::scoped_lock lock(mutex_);
    positions_[position].posted = false;
    positions_[position].wanted = positions_[position].passes;
    changed_.notify_all();
    throw;
  }
}

void OpGradientQueue::take(std::size_t position, std::unique_ptr<Taker> taker) {
  TensorId tensor = 0;
  try {
    const std::scoped_lock lock(mutex_);
    tensor = accept(position, taker);
  } catch (...) {
    taker->finish(std::current_exception());
    return;
  }
  listen(position, tensor);
}

void OpGradientQueue::listen(std::size_t position, TensorId tensor) {
  engine_->then({model_, tensor}, [weak = weak_from_this(), position](const std::exception_ptr& e) {
    if (const auto self = weak.lock()) {
      self->ended(position, e);
    }
  });
}

// Called under the lock.
void OpGradientQueue::begin(Position& position, std::unique_ptr<Taker> taker) {
  position.posted = true;
  position.taken = taker != nullptr;
  position.taker = std::move(taker);
  ++position.passes;
  if (position.passes > passes_) {
    passes_ = position.passes;
    changed_.notify_all();
  }
}

// Called under the lock. Returns whether the squares of the newest pass are to be sent now.
bool OpGradientQueue::beginSquares() {
  if (positions_.size() == gradients_) {
    return false;
  }
  Position& squares = positions_[gradients_];
  squares.wanted = std::max(squares.wanted, passes_);
  if (squares.posted || squares.passes == squares.wanted) {
    return false;
  }
  begin(squares, std::make_unique<Nobody>());
  return true;
}

// Marks a gradient that is in its place ready, or holds it.
void OpGradientQueue::send(std::size_t position) {
  const TensorKey tensor{model_, positions_[position].place.tensor};
  if (position < gradients_ && gradients_ < positions_.size()) {
    engine_->announce(tensor);
    const std::scoped_lock lock(mutex_);
    const Position& squares = positions_[gradients_];
    const std::uint64_t squaresDone = squares.passes - (squares.posted ? 1 : 0);
    if (positions_[position].passes > squaresDone + 1) {
      held_.push_back(tensor);
      return;
    }
  }
  engine_->tensorReady(tensor);
}

// Called under the lock. Moves the taker into the position, or throws and leaves it.
TensorId OpGradientQueue::accept(std::size_t position, std::unique_ptr<Taker>& taker) {
  if (closed_) {
    std::rethrow_exception(closedError());
  }
  if (position >= gradients_) {
    throw InvalidUsage(concat("there is no gradient number ", position));
  }
  Position& own = positions_[position];
  if (!own.posted || own.taken) {
    throw InvalidUsage(concat(
        "the sum of '", own.place.name, "' was asked for ",
        own.posted ? "twice" : "before its gradient came"));
  }
  own.taker = std::move(taker);
  own.taken = true;
  return own.place.tensor;
}

void OpGradientQueue::ended(std::size_t position, const std::exception_ptr& error) {
  const std::scoped_lock lock(mutex_);
  ended_.push_back({position, error});
  wakeUp_.notify_one();
}

void OpGradientQueue::run() {
  nameThisThread("hvdo op grads");
  std::unique_lock lock(mutex_);
  while (true) {
    wakeUp_.wait(lock, [this] { return closed_ || !ended_.empty(); });
    if (ended_.empty()) {
      break;
    }
    const EndedExchange next = std::move(ended_.front());
    ended_.pop_front();
    deliver(lock, next);
  }
  for (std::size_t position = 0; position < positions_.size(); ++position) {
    deliver(lock, {position, closedError()});
  }
}

// Called under the lock; releases it to call the taker.
void OpGradientQueue::deliver(std::unique_lock<std::mutex>& lock, const EndedExchange& ended) {
  Position& position = positions_[ended.position];
  std::unique_ptr<Taker> taker = std::exchange(position.taker, nullptr);
  if (!taker) {
    return; // already delivered by `close`
  }
  std::exception_ptr error = ended.error;
  lock.unlock();
  if (!error) {
    try {
      taker->receive(position.place.memory, position.place.sizeBytes);
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock.lock();
  position.posted = false;
  std::vector<TensorKey> due;
  if (error) {
    position.wanted = position.passes; // nothing more can be sent
  } else if (ended.position == gradients_) {
    due.swap(held_); // all of the next pass: no gradient comes twice before its sum is there
  }
  const bool again = position.passes < position.wanted && !closed_;
  if (again) {
    begin(position, std::make_unique<Nobody>());
  }
  lock.unlock();
  taker->finish(error);
  taker.reset();
  try {
    if (again) {
      sendZeros(ended.position);
    }
    for (const TensorKey tensor : due) {
      engine_->tensorReady(tensor);
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): whoever waits for these sums is told by others
  }
  lock.lock();
  changed_.notify_all();
}

void OpGradientQueue::standIn(std::uint64_t pass) {
  std::vector<std::size_t> idle;
  std::vector<std::size_t> untaken;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) {
      std::rethrow_exception(closedError());
    }
    if (pass > passes_) {
      passes_ = pass;
      changed_.notify_all();
    }
    for (std::size_t position = 0; position < positions_.size(); ++position) {
      Position& own = positions_[position];
      own.wanted = std::max(own.wanted, pass);
      if (!own.posted && own.passes < own.wanted) {
        begin(own, std::make_unique<Nobody>());
        idle.push_back(position);
      } else if (own.posted && !own.taken) {
        own.taker = std::make_unique<Nobody>();
        own.taken = true;
        untaken.push_back(position);
      }
    }
  }
  for (const std::size_t position : untaken) {
    listen(position, positions_[position].place.tensor);
  }
  std::exception_ptr error;
  for (const std::size_t position : idle) {
    try {
      sendZeros(position);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

// Called after `begin`, with a taker that drops the sum.
void OpGradientQueue::sendZeros(std::size_t position) {
  const Place& place = positions_[position].place;          // never moves
  std::fill_n(place.memory, place.sizeBytes, std::byte{0}); // squares have no memory here
  try {
    send(position);
  } catch (...) { // the engine has failed
    const std::scoped_lock lock(mutex_);
    positions_[position].taker.reset();
    positions_[position].posted = false;
    positions_[position].wanted = positions_[position].passes;
    changed_.notify_all();
    throw;
  }
  listen(position, place.tensor);
}

std::uint64_t OpGradientQueue::passes() const {
  const std::scoped_lock lock(mutex_);
  return passes_;
}

std::optional<std::uint64_t> OpGradientQueue::waitForPass(std::uint64_t known) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || passes_ > known; });
  return closed_ ? std::nullopt : std::optional(passes_);
}

void OpGradientQueue::waitUntilIdle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return closed_ ||
        std::ranges::none_of(positions_, [](const Position& position) { return position.posted; });
  });
}

void OpGradientQueue::close() noexcept {
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

std::uint64_t OpGradientQueue::posts() const {
  const std::scoped_lock lock(mutex_);
  return posts_;
}

} // namespace hvd_order
