#include "engine/engine.h"

#include <cstdio>
#include <utility>

#include "base/error.h"
#include "base/thread_name.h"
#include "engine/activity.h"
#include "engine/failure_message.h"
#include "transport/control_words.h"

// A gradient's path through this file:
// - `tensorReady` (a hook's thread) marks the gradient and wakes the engine's thread.
// - `drive` asks the agreement for decisions and hands slices to the transport.
// - `sliceDone` (a thread of the transport) returns the credit, completes tensors, wakes waiters,
//   and calls `drive`, because the credit may now admit another slice, and because slices of a
//   split layout become ready by the end of others.
// - `onMessage` (a thread of the control channel) handles a message and calls `drive` as well.
//
// Driving is a role that one thread has at a time. So when a slice ends, or rank 0 decides one,
// the next slice follows without a thread switch. If a model trains on the same cores, each switch
// waits for a core, some milliseconds at worst.
//
// Invariants: only the driving thread issues slices, so they reach the transport in the agreed
// order. A thread that finds the role taken sets `dirty_` and leaves; the driver then decides
// again. Transport and control channel are never called under `mutex_`.
//
// The clock has two uses: it ends link reservations, and `lookAround` asks the watch (watch.h) what
// failed transfers and stalls demand now.

namespace hvd_order {

namespace {

template <typename T>
std::exception_ptr errorOf(const std::string& text) {
  return std::make_exception_ptr(T(text));
}

} // namespace

Engine::Engine(
    EngineOptions options,
    std::shared_ptr<Transport> transport,
    std::shared_ptr<ControlChannel> control)
    : options_(std::move(options)),
      transport_(std::move(transport)),
      control_(std::move(control)),
      agreements_(
          options_.agreement,
          options_.rank,
          options_.size,
          options_.policy,
          options_.creditBytes),
      health_(options_.rank, options_.size),
      watch_(options_.rank, options_.size, {options_.timeout, options_.stallWarning}, Clock::now()),
      barrier_(options_.rank, options_.size) {
  if (options_.size > 1 && !control_) {
    throw InvalidUsage("an engine of several ranks needs a control channel");
  }
}

void Engine::start() {
  HVDO_CHECK(!thread_.joinable(), "the engine runs already");
  const std::weak_ptr<Engine> weak = weak_from_this();
  if (control_) {
    control_->start(
        [weak](Rank from, const ControlMessage& message) {
          if (const auto self = weak.lock()) {
            self->onMessage(from, message);
          }
        },
        [weak](Rank peer, const std::exception_ptr& error) {
          if (const auto self = weak.lock()) {
            self->onLost(peer, error);
          }
        });
  }
  transport_->onEnqueued([weak](SliceKey slice) {
    if (const auto self = weak.lock()) {
      self->sliceEnqueued(slice);
    }
  });
  // The thread keeps the engine alive, so that no callback can destroy it.
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
}

void Engine::addModel(
    ModelId model,
    std::shared_ptr<const SliceLayout> layout,
    std::vector<SliceIndex> plan) {
  completion_.check();
  const std::scoped_lock lock(mutex_);
  const SliceLayout& known = *layout; // the agreement keeps the layout alive
  enqueued_.addModel(model, layout);
  agreement().addModel(model, std::move(layout), std::move(plan));
  watch_.addModel(model, Clock::now());
  completion_.addModel(model, known.tensors().size());
  reservation_.addModel(model, known);
  dirty_ = true; // rank 0 may already have decided slices of this model
  alarm();       // from now on the engine's thread looks for stalls
}

void Engine::removeModel(ModelId model) {
  const std::scoped_lock lock(mutex_);
  agreement().removeModel(model);
  watch_.removeModel(model);
  enqueued_.removeModel(model);
  completion_.removeModel(model);
  reservation_.removeModel(model);
  timeline_.forget(model);
}

void Engine::retune(
    AgreementKind agreement,
    Policy policy,
    ByteCount creditBytes,
    std::chrono::nanoseconds lead) {
  const std::scoped_lock lock(mutex_);
  agreements_.retune(agreement, policy, creditBytes);
  reservation_.retune(lead, creditBytes);
  reservationChanged();
}

std::optional<std::uint64_t> Engine::holdPlan() {
  const std::scoped_lock lock(mutex_);
  return agreements_.holdPlan();
}

void Engine::endPlan(std::uint64_t issued, AgreementKind agreement, Policy policy) {
  const std::scoped_lock lock(mutex_);
  agreements_.endPlan(issued, agreement, policy);
  wake();
}

Engine::AgreementCounts Engine::takeCounts() {
  const std::scoped_lock lock(mutex_);
  return {std::exchange(messages_, 0), agreements_.takeHoldUps()};
}

bool Engine::wait(TensorKey tensor, Clock::time_point deadline, Stage stage) {
  // A host that waits for a launch is ahead of its device, which need not be idle.
  if (reserved_ && stage == Stage::kEnded) {
    const std::scoped_lock lock(mutex_);
    if (reservation_.someoneWaits()) {
      reservationChanged();
    }
  }
  return completion_.wait(tensor, deadline, stage);
}

void Engine::then(TensorKey tensor, Completion::Then then) {
  completion_.then(tensor, std::move(then));
}

// Called under the lock.
void Engine::reservationChanged() {
  reserved_ = reservation_.largestBytes() != Scheduler::kAnySize;
  agreement().reserve(reservation_.largestBytes());
  dirty_ = true;
  alarm();
}

void Engine::announce(TensorKey tensor) {
  const std::scoped_lock lock(mutex_);
  completion_.announce(tensor);
  watch_.progress(tensor.model, Clock::now());
  if (watch_.hasRankLeft()) {
    alarm(); // starts the watch for a stranded exchange
  }
}

// Called under the lock. Returns whether slices became ready.
bool Engine::offer(TensorKey tensor, Clock::time_point now) {
  const std::vector<SliceKey>& ready = agreement().tensorReady(tensor);
  for (const SliceKey slice : ready) {
    timeline_.ready(slice);
  }
  if (reservation_.ready(tensor, ready, now)) {
    reservationChanged();
  }
  return !ready.empty();
}

void Engine::tensorReady(TensorKey tensor) {
  std::unique_lock lock(mutex_);
  completion_.check();
  const Clock::time_point now = Clock::now();
  watch_.progress(tensor.model, now);
  bool offered = false;
  if (completion_.isEnqueued(tensor)) {
    earlyTensors_.push_back(tensor); // until `sliceDone` has seen the end of the exchange before
  } else {
    offered = offer(tensor, now);
  }
  completion_.ready(tensor, now);
  if (watch_.hasRankLeft()) {
    alarm(); // starts the watch for a stranded exchange
  }
  if (!offered || !agreement().mayDecide()) {
    return;
  }
  if (agreement().isSilent()) { // costs no messages, so it need not leave this thread
    dirty_ = true;
    drive(lock);
  } else {
    wake();
  }
}

void Engine::run() {
  nameThisThread("hvdo engine");
  std::unique_lock lock(mutex_);
  // Another thread that drives observes dirty_, but not the clock.
  const auto called = [&] { return stop_ || alarmed_ || (dirty_ && !driving_); };
  while (!stop_) {
    const Clock::time_point next =
        std::min(reservation_.until(), watch_.nextLook(Clock::now(), completion_.pendingModels()));
    if (next == Clock::time_point::max()) {
      wakeUp_.wait(lock, called);
    } else {
      wakeUp_.wait_until(lock, next, called);
    }
    alarmed_ = false;
    if (reservation_.expire(Clock::now())) {
      reservationChanged();
    }
    lookAround(lock);
    drive(lock);
  }
}

// Called under the lock; releases it to act.
void Engine::drive(std::unique_lock<std::mutex>& lock) {
  if (driving_) {
    return; // the driving thread observes dirty_
  }
  driving_ = true;
  while (dirty_ && !stop_ && !completion_.failed()) {
    dirty_ = false;
    decisions_.clear();
    try {
      agreements_.decide(decisions_);
    } catch (...) {
      transferFailed(std::current_exception());
      break;
    }
    messages_ += decisions_.messages.size();
    const std::uint32_t agreementNumber = agreements_.number();
    lock.unlock();
    act(decisions_, agreementNumber);
    lock.lock();
  }
  if (completion_.failed()) {
    dirty_ = false; // no further slice is issued
  }
  driving_ = false;
  if (stop_) {
    wakeUp_.notify_one(); // shutdown waits for this
  }
}

void Engine::act(const Decisions& decisions, std::uint32_t agreementNumber) {
  try {
    for (const SliceMessage& message : decisions.messages) {
      ControlMessage words{MessageKind::kSlices, {agreementNumber}};
      words.words.reserve(1 + message.slices.size());
      for (const SliceKey slice : message.slices) {
        words.words.push_back(slice.word());
      }
      control_->send(message.to, words);
    }
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    transferFailed(std::current_exception());
    return;
  }
  const std::weak_ptr<Engine> weak = weak_from_this();
  for (const SliceKey key : decisions.issue) {
    const Slice* slice = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      // The layout lives as long as the model, and the model as long as it has slices in flight.
      slice = &agreement().scheduler().layout(key.model).slices()[key.index];
    }
    timeline_.issued(key);
    try {
      transport_->issue(key, *slice, [weak, key](std::exception_ptr error) {
        if (const auto self = weak.lock()) {
          self->sliceDone(key, std::move(error));
        }
      });
    } catch (...) {
      sliceDone(key, std::current_exception());
    }
  }
}

void Engine::sliceEnqueued(SliceKey slice) {
  const std::scoped_lock lock(mutex_);
  completion_.enqueue(enqueued_.add(slice));
}

void Engine::sliceDone(SliceKey slice, std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  if (error) {
    transferFailed(std::move(error));
    return;
  }
  timeline_.done(slice);
  if (reservation_.done(slice)) {
    reservationChanged();
  }
  completion_.complete(agreement().sliceDone(slice));
  for (const SliceKey next : agreement().scheduler().becameReady()) {
    timeline_.ready(next);
  }
  const std::vector<Health::Addressed> answers = barrier_.sliceDone();
  partingChanged_.notify_all();
  const Clock::time_point now = Clock::now();
  watch_.progress(slice.model, now);
  std::erase_if(earlyTensors_, [&](TensorKey tensor) {
    const bool due = !completion_.isEnqueued(tensor);
    if (due) {
      offer(tensor, now);
    }
    return due;
  });
  dirty_ = true;
  drive(lock);
  lock.unlock();
  sendAll(answers);
}

void Engine::onMessage(Rank from, const ControlMessage& message) {
  std::vector<Health::Addressed> answers;
  {
    std::unique_lock lock(mutex_);
    try {
      answers = handle(from, message);
    } catch (...) {
      transferFailed(std::current_exception());
    }
    drive(lock);
  }
  sendAll(answers);
}

// Called under the lock. Returns the answers to send.
std::vector<Health::Addressed> Engine::handle(Rank from, const ControlMessage& message) {
  switch (message.kind) {
    case MessageKind::kSlices: {
      ControlWords words(from, message);
      const std::uint32_t number = words.next("the number of its agreement");
      std::vector<SliceKey> slices;
      slices.reserve(message.words.size());
      for (const std::uint32_t word : words.rest()) {
        slices.push_back(SliceKey::fromWord(word));
      }
      agreements_.received(from, number, slices);
      dirty_ = true;
      return {};
    }
    case MessageKind::kQuery:
    case MessageKind::kReply:
    case MessageKind::kActivity:
      return health_.received(agreement().scheduler(), from, message, activity());
    case MessageKind::kFailed: {
      // Rank 0 relays: failures go over the connections to rank 0, not down the tree.
      setFailure(unpackFailure(message.words), options_.rank == 0);
      return {};
    }
    case MessageKind::kLeave:
      ControlWords(from, message).end();
      gone_.insert(from);
      watch_.rankLeft(from, Clock::now());
      alarm();
      return barrier_.gone(from);
    case MessageKind::kBarrier:
    case MessageKind::kFinished:
    case MessageKind::kMissing: {
      auto answers = barrier_.received(from, message);
      partingChanged_.notify_all();
      return answers;
    }
  }
  ControlWords(from, message).refuse("there is no such kind");
}

void Engine::onLost(Rank peer, const std::exception_ptr& error) {
  const std::scoped_lock lock(mutex_);
  if (stop_ || !gone_.insert(peer).second) {
    return;
  }
  // The failure ends every shutdown barrier, so `barrier_` need not be told that the peer is gone.
  const std::exception_ptr lost = isMalformed(error)
      ? error
      : errorOf<PeerLost>(concat(
            "rank ", peer,
            " is gone: its process died or its network connection broke (seen by rank ",
            options_.rank, ": ", textOf(error), ")"));
  setFailure(lost);
}

// Called under the lock.
void Engine::transferFailed(std::exception_ptr error) {
  watch_.transferFailed(std::move(error), Clock::now());
  alarm();
}

// Called under the lock. Returns whether this is the first failure.
bool Engine::setFailure(const std::exception_ptr& error, bool informOthers) {
  if (!completion_.fail(error)) {
    return false;
  }
  watch_.end();
  if (informOthers) {
    failureToSend_ = error;
  }
  alarm();
  return true;
}

void Engine::fail(std::exception_ptr error) {
  error = withRank(error, options_.rank);
  const std::scoped_lock lock(mutex_);
  setFailure(error);
}

void Engine::checkStalled() {
  {
    const std::scoped_lock lock(mutex_);
    if (watch_.isNearlyTimedOut(Clock::now(), completion_.pendingModels())) {
      failStalled();
    }
  }
  check();
}

// Called under the lock.
void Engine::failStalled() {
  setFailure(
      errorOf<TransferTimeout>(concat(
          "nothing moved for ", std::chrono::duration<double>(options_.timeout).count(),
          " s: ", watch_.hasAsked() ? stallReport() : "")));
}

// Does what the watch demands now, and sends a failure of this rank. Called under the lock;
// releases it to send.
void Engine::lookAround(std::unique_lock<std::mutex>& lock) {
  const StallWatch::Action action = watch_.look(Clock::now(), completion_.pendingModels());
  const Scheduler& scheduler = agreement().scheduler();
  std::vector<Health::Addressed> questions;
  std::string warning;
  switch (action.kind) {
    case ActionKind::kNone:
      break;
    case ActionKind::kAsk:
      questions =
          health_.ask(scheduler, scheduler.pendingTensors(action.model), agreement().head());
      break;
    case ActionKind::kWarn:
      warning = concat(
          "hvd_order: nothing has moved for ",
          std::chrono::duration_cast<std::chrono::seconds>(action.stalled).count(),
          " s: ", stallReport());
      break;
    case ActionKind::kTimeOut:
      failStalled();
      break;
    case ActionKind::kFail:
      setFailure(action.error);
      break;
  }
  const std::exception_ptr failure = std::exchange(failureToSend_, nullptr);
  if (action.kind == ActionKind::kNone && !failure) {
    return;
  }
  lock.unlock();
  if (action.kind == ActionKind::kAsk) {
    transport_->inquire();
    sendAll(questions);
  }
  if (action.kind == ActionKind::kWarn && options_.warn) {
    options_.warn(warning);
  } else if (action.kind == ActionKind::kWarn) {
    std::fprintf(stderr, "%s\n", warning.c_str());
  }
  if (failure) {
    sendFailure(failure);
  }
  lock.lock();
}

std::string Engine::stallReport() const {
  const std::string known = transport_->report();
  return known.empty() ? health_.report(agreement().scheduler()) : known;
}

void Engine::sendFailure(const std::exception_ptr& error) {
  sendToOthers({MessageKind::kFailed, packFailure(error)});
  transport_->abort();
}

void Engine::sendToOthers(const ControlMessage& message) {
  if (options_.rank != 0) {
    sendAll({{0, message}});
    return;
  }
  std::vector<Health::Addressed> messages;
  for (Rank rank = 1; rank < options_.size; ++rank) {
    messages.push_back({rank, message});
  }
  sendAll(messages);
}

void Engine::sendAll(const std::vector<Health::Addressed>& messages) {
  for (const Health::Addressed& m : messages) {
    {
      const std::scoped_lock lock(mutex_);
      if (gone_.contains(m.to)) {
        continue;
      }
    }
    try {
      control_->send(m.to, m.message);
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
      // The peer is gone; onLost reports its loss.
    }
  }
}

// Called under the lock.
void Engine::wake() {
  dirty_ = true;
  wakeUp_.notify_one();
}

// Called under the lock.
void Engine::alarm() {
  alarmed_ = true;
  wakeUp_.notify_one();
  partingChanged_.notify_all();
}

bool Engine::drain(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return partingChanged_.wait_until(
      lock, deadline, [&] { return completion_.failed() || completion_.pendingCount() == 0; });
}

void Engine::enterShutdownBarrier() {
  std::vector<Health::Addressed> messages;
  {
    const std::scoped_lock lock(mutex_);
    messages = barrier_.begin();
  }
  sendAll(messages);
}

bool Engine::mayLeave(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return partingChanged_.wait_until(
      lock, deadline, [&] { return completion_.failed() || barrier_.mayLeave(); });
}

std::vector<Rank> Engine::awaited(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const auto messages = barrier_.ask();
  lock.unlock();
  sendAll(messages);
  lock.lock();
  partingChanged_.wait_until(lock, deadline, [&] { return barrier_.isAnswered(); });
  return barrier_.missing();
}

void Engine::shutdown() noexcept {
  bool withoutError = false;
  {
    const std::scoped_lock lock(mutex_);
    if (stop_) {
      return;
    }
    stop_ = true;
    withoutError =
        setFailure(errorOf<InvalidUsage>("the engine has been shut down"), /*informOthers=*/false);
    wakeUp_.notify_one();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  const std::exception_ptr failure = [&] {
    std::unique_lock lock(mutex_);
    wakeUp_.wait(lock, [&] { return !driving_; }); // a thread of the transport may be issuing
    return std::exchange(failureToSend_, nullptr);
  }();
  if (failure) {
    sendFailure(failure);
  }
  if (control_) {
    if (withoutError) { // else the other ranks have the failure already
      sendToOthers({MessageKind::kLeave, {}});
    }
    control_->stop();
  }
}

} // namespace hvd_order
