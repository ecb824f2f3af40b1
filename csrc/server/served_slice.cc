#include "server/served_slice.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "server/arguments.h"
#include "server/delay_order.h"
#include "server/served_model.h"

namespace hvd_order {

namespace {

// Copies for a replica that may lag go when nothing else waits.
constexpr std::uint64_t kWhenIdle = Link::kLast - 1;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr Round kNoRound = 0; // of an ask that is done with

std::uint32_t partOf(const FrameHeader& pull) {
  const auto part = static_cast<std::uint32_t>(pull.argument >> kPartBits);
  if (part < kValuePart || part >= kMostParts) {
    throw FrameError(concat("a pull of part ", part, " of a state"));
  }
  return part;
}

// What only sums can only wait for all.
Consistency consistencyOf(const ServedModel& model) {
  return model.registration.serversUpdate ? model.room.options.consistency
                                          : Consistency::kSynchronous;
}

} // namespace

ServedSlice::Work::~Work() {
  const std::vector<int> freed = std::exchange(slice_.freed_, {});
  lock_.unlock();
  for (const int worker : freed) {
    while (const auto next = slice_.model_.room.windows.next(worker)) {
      next->admit();
    }
  }
}

ServedSlice::ServedSlice(ServedModel& model, SliceIndex index)
    : model_(model),
      index_(index),
      held_(
          model.registration.slices[index],
          model.registration.serversUpdate,
          consistencyOf(model),
          model.room.options.workers,
          mayLag()) {}

std::tuple<SliceIndex, ModelId, std::uint32_t> ServedSlice::key() const {
  return {index_, model_.id, model_.layout};
}

std::uint32_t ServedSlice::sizeBytes() const {
  return model_.registration.slices[index_].sizeBytes;
}

// A parameter may miss a small update; a worker that waits for a sum may not.
bool ServedSlice::mayLag() const {
  return model_.registration.serversUpdate && model_.room.options.divergenceBound > 0;
}

bool ServedSlice::asksFirst() const {
  return model_.room.options.delayBound && consistencyOf(model_) == Consistency::kAsynchronous;
}

std::uint64_t ServedSlice::urgency() const {
  return model_.room.urgencyOf(index_);
}

// The same for a state and the updates that follow it, which must not overtake it.
std::uint64_t ServedSlice::replicaUrgency() const {
  return model_.room.options.divergenceBound > 0 ? kWhenIdle : urgency();
}

void ServedSlice::send(Peer to, std::uint64_t urgency, const FrameHeader& header, Payload payload)
    const {
  model_.room.peers.send(to, urgency, header, std::move(payload));
}

std::optional<ServedSlice::Report> ServedSlice::report() const {
  const std::scoped_lock lock(mutex_);
  if (!held_.installed()) {
    return std::nullopt;
  }
  return Report{
      place_.owner == model_.room.options.server, held_.state().version, held_.state().value};
}

std::vector<int> ServedSlice::missing() const {
  const std::scoped_lock lock(mutex_);
  return held_.waits() ? held_.missing() : std::vector<int>{};
}

// ----------------------------------------------------------------------------- pushes and answers

void ServedSlice::push(Peer from, int worker, const FrameHeader& header, Payload payload) {
  if (payload.sizeBytes != sizeBytes()) {
    throw FrameError(concat(
        "a push of ", payload.sizeBytes, " bytes for slice ", index_, ", which has ", sizeBytes()));
  }
  if (header.round == 0) {
    throw FrameError("rounds count from 1");
  }
  const Work work(*this);
  if (asksFirst()) {
    if (!admitted_ || admitted_->worker != worker || admitted_->round != header.round) {
      return; // told to before a map came by which it has asked again
    }
    endAdmission(/*came=*/true);
  }
  if (from.kind == Peer::Kind::kServer) {
    passedOn(header);
    held_.needRules(static_cast<RulesNumber>(header.argument >> kPartBits));
  }
  held_.push(worker, header.round, std::move(payload));
  settleNow();
}

void ServedSlice::pull(Peer from, int worker, const FrameHeader& header) {
  const std::uint32_t part = partOf(header);
  const Work work(*this);
  if (from.kind == Peer::Kind::kServer) {
    passedOn(header);
  } else {
    held_.isOver(header.round);
  }
  owed_.push_back({worker, header.round, part});
  settleNow();
}

void ServedSlice::rulesCame() {
  const Work work(*this);
  followCopies();
  settleNow();
}

// Of the original alone.
void ServedSlice::advance() {
  for (const auto& [worker, round] : held_.takeApplied()) {
    owed_.push_back({worker, round, kValuePart}); // its answer was lost with another server
  }
  const std::shared_lock lock(model_.rulesMutex);
  while (const auto update = held_.advance(model_.rules, mayLag() && follower_ != kNoServer)) {
    afterUpdate(*update);
  }
  answerWhenAllowed();
}

void ServedSlice::afterUpdate(const HeldSlice::Update& update) {
  if (follower_ != kNoServer) {
    const Round version = held_.state().version;
    unacknowledged_.push_back(
        {version, update.worker, update.round, update.change, /*isState=*/false});
    FrameHeader header = model_.about(FrameKind::kReplica, index_);
    header.round = update.round;
    header.map = update.rules;
    header.argument = static_cast<std::uint64_t>(update.worker + 1) << kPartBits | version;
    send({Peer::Kind::kServer, follower_}, replicaUrgency(), header, update.sum);
  }
  if (update.worker != HeldSlice::kEveryWorker) {
    owed_.push_back({update.worker, update.round, kValuePart});
  } else {
    for (int worker = 0; worker < model_.room.options.workers; ++worker) {
      owed_.push_back({worker, update.round, kValuePart});
    }
  }
  answerWhenAllowed();
}

// What may be told: only what a replica has, or nearly has, and nothing to those who ran ahead.
void ServedSlice::answerWhenAllowed() {
  if (owed_.empty()) {
    return;
  }
  double lag = 0;
  for (const Unacknowledged& update : unacknowledged_) {
    lag += update.change;
  }
  const ServerOptions& options = model_.room.options;
  if (mayLag() ? lag > options.divergenceBound : !unacknowledged_.empty()) {
    return;
  }
  const std::uint64_t slowest = held_.slowest();
  std::erase_if(owed_, [&](const Answer& owed) {
    const bool tooFarAhead = options.consistency == Consistency::kAsynchronous &&
        owed.round > slowest + options.staleness;
    if (tooFarAhead || !held_.applied(owed.worker, owed.round)) {
      return false;
    }
    answer(owed);
    return true;
  });
}

void ServedSlice::answer(const Answer& to) {
  const SliceState& state = held_.state();
  const std::size_t moment = to.part - kValuePart - 1; // of no use for the value
  FrameHeader header = model_.about(FrameKind::kValue, index_);
  header.round = to.round;
  header.argument = state.stepsBefore + state.version;
  header.flags = held_.wasSkipped(to.worker, to.round) ? kFrameFlagLate : std::uint16_t{0};
  send(
      {Peer::Kind::kWorker, to.worker}, urgency(), header,
      to.part == kValuePart               ? state.value
          : moment < state.moments.size() ? state.moments[moment]
                                          : Payload{});
}

// ---------------------------------------------------------------------------- whose turn it is

void ServedSlice::ask(int worker, const FrameHeader& header) {
  if (!asksFirst()) {
    throw FrameError("nobody has to ask before a push here");
  }
  if (header.round == 0) {
    throw FrameError("rounds count from 1");
  }
  const Work work(*this);
  std::erase_if(asks_, [&](const Ask& ask) { return ask.worker == worker; });
  asks_.push_back({worker, header.round, header.argument, header.map});
  settleNow();
}

void ServedSlice::admit() {
  const Work work(*this);
  settleNow();
}

// Answers those whose update has been made, perhaps by a server that is lost; lets those that come
// too late count as made; admits the next if nobody is.
void ServedSlice::admitNext() {
  if (held_.waits()) {
    return; // until the rules of that update come, nobody knows what is late after it
  }
  std::erase_if(asks_, [&](const Ask& ask) {
    const bool wasMade = held_.applied(ask.worker, ask.round);
    if (wasMade) {
      owed_.push_back({ask.worker, ask.round, kValuePart});
    }
    return wasMade;
  });
  const std::vector<WaitingUpdate> updates = waitingUpdates();
  const NextUpdates next = nextUpdates(updates);
  for (const std::size_t late : next.late) {
    held_.skip(asks_[late].worker, asks_[late].round);
    asks_[late].round = kNoRound;
  }
  if (!admitted_) {
    std::vector<std::size_t> candidates = next.candidates;
    std::stable_sort(candidates.begin(), candidates.end(), [&](std::size_t a, std::size_t b) {
      return updates[a].seconds < updates[b].seconds;
    });
    admitOneOf(candidates);
  }
  std::erase_if(asks_, [](const Ask& ask) { return ask.round == kNoRound; });
}

std::vector<WaitingUpdate> ServedSlice::waitingUpdates() const {
  const SliceState& state = held_.state();
  const auto steps = static_cast<std::int64_t>(state.stepsBefore + state.version);
  const auto bound = static_cast<std::int64_t>(*model_.room.options.delayBound);
  const std::int64_t turnsTaken = admitted_ ? 1 : 0;
  std::vector<WaitingUpdate> updates;
  updates.reserve(asks_.size());
  for (const Ask& ask : asks_) {
    // Before the first answer a worker has what the model began with; a copy that took over may
    // have seen less than its worker.
    const auto read = static_cast<std::int64_t>(std::max(ask.read, state.stepsBefore));
    const std::int64_t delay = std::max<std::int64_t>(0, steps - read);
    updates.push_back(
        {bound - delay - turnsTaken, model_.room.windows.expectedSeconds(ask.worker, sizeBytes())});
  }
  return updates;
}

// The first of them whose line has room; if none has, this slice is told when one has.
void ServedSlice::admitOneOf(const std::vector<std::size_t>& candidates) {
  PushWindows& windows = model_.room.windows;
  const auto admitFirst = [&] {
    for (const std::size_t index : candidates) {
      Ask& ask = asks_[index];
      if (windows.take(ask.worker, sizeBytes(), now())) {
        admitted_ = ask;
        FrameHeader header = model_.about(FrameKind::kAdmit, index_);
        header.round = ask.round;
        send({Peer::Kind::kWorker, ask.worker}, urgency(), header, {});
        ask.round = kNoRound;
        return true;
      }
    }
    return false;
  };
  if (candidates.empty() || admitFirst()) {
    return;
  }
  std::vector<int> workers;
  workers.reserve(candidates.size());
  for (const std::size_t index : candidates) {
    workers.push_back(asks_[index].worker);
  }
  windows.await(workers, {model_.shared_from_this(), this});
  admitFirst(); // room may have been given back before it was awaited
}

void ServedSlice::endAdmission(bool came) {
  if (admitted_) {
    model_.room.windows.giveBack(admitted_->worker, sizeBytes(), came, now());
    freed_.push_back(admitted_->worker);
    admitted_.reset();
  }
}

void ServedSlice::retire() {
  const Work work(*this);
  asks_.clear();
  endAdmission(/*came=*/false);
}

void ServedSlice::switched(int worker, std::uint32_t map) {
  if (!asksFirst()) {
    return;
  }
  const Work work(*this);
  std::erase_if(asks_, [&](const Ask& ask) { return ask.worker == worker && ask.map < map; });
  if (admitted_ && admitted_->worker == worker && admitted_->map < map) {
    endAdmission(/*came=*/false);
  }
  settleNow();
}

} // namespace hvd_order
