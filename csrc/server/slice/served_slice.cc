#include "server/slice/served_slice.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "server/slice/served_model.h"
#include "server/wire/arguments.h"

// The path of a push through the owner: store it, apply it, copy it to the replica, answer it.
//
// The frame of a push or pull is only stored. `settleNow` (slice_moves.cc) then calls `advance`,
// which applies every update that is due. Each update is sent to the follower and adds an entry to
// `owed_` for every worker in it; `answerWhenAllowed` answers the entries that may be answered.
//
// Invariant: if the slice has a replica, an answer waits until the replica has acknowledged all
// updates; with a divergence bound, which applies only where servers update parameters, until the
// norms of the unacknowledged updates add up to no more than the bound. An asynchronous answer
// also waits until its worker is no more than `staleness` rounds ahead of the slowest one.
//
// Pushes are idempotent: a worker whose push was applied before, by this server or a lost one,
// only gets its answer again.
//
// A group's sum is applied as one update. If all its members may be answered at once, the helper
// answers them; otherwise the helper gets an empty reply and each member is answered from here.
namespace hvd_order {

namespace {

// Copies for a replica that may lag go when no other frame waits.
constexpr std::uint64_t kWhenIdle = Connection::kLast - 1;

std::uint32_t partOf(const FrameHeader& pull) {
  const auto part = static_cast<std::uint32_t>(pull.argument >> kPartBits);
  if (part < kValuePart || part >= kMostParts) {
    throw FrameError(concat("a pull of part ", part, " of a state"));
  }
  return part;
}

// A server that only sums has to wait for all workers.
Consistency consistencyOf(const ServedModel& model) {
  return model.registration.serversUpdate ? model.room.options.consistency
                                          : Consistency::kSynchronous;
}

} // namespace

ServedSlice::Work::~Work() {
  const auto freed = std::exchange(slice_.freed_, {});
  lock_.unlock();
  for (const auto& [windows, sender] : freed) {
    while (const auto next = windows->next(sender)) {
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

PushWindows::Key ServedSlice::key() const {
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
  return model_.room.options.urgencyOf(index_);
}

// A state and the updates that follow it have the same urgency: they must not overtake the state.
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
    const bool isDirect = admission_ && admission_->helper == Routes::kDirect;
    if (!isDirect || admission_->asks.front().worker != worker ||
        admission_->asks.front().round != header.round) {
      return; // admitted before a map came, by which the worker asks again
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
    held_.markOver(header.round);
  }
  owed_.push_back({worker, header.round, part});
  settleNow();
}

void ServedSlice::rulesCame() {
  const Work work(*this);
  followCopies();
  settleNow();
}

// For the original only: applies what is due, and answers.
void ServedSlice::advance() {
  if (arrived_ && std::ranges::any_of(arrived_->asks, [&](const Ask& ask) {
        return held_.applied(ask.worker, ask.round);
      })) { // the new state contains some of these updates: a sum cannot be split
    askAgain(arrived_->asks);
    dropGroup();
  }
  for (const auto& [worker, round] : held_.takeApplied()) {
    owed_.push_back({worker, round, kValuePart}); // the answer was lost with another server
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
    header.flags = update.members.empty() ? std::uint16_t{0} : kFrameFlagGroup;
    send(
        {Peer::Kind::kServer, follower_}, replicaUrgency(), header,
        update.members.empty() ? update.sum : withMembers(update.sum, update.members));
  }
  if (!update.members.empty()) {
    for (const Member& member : update.members) {
      owed_.push_back({member.worker, member.round, kValuePart});
    }
    if (relay_) { // some of its members may not be answered yet
      tellHelper(relay_->helper, relay_->group, {});
    }
    relay_ = Relay{arrived_->helper, arrived_->group, update.members};
    arrived_.reset();
  } else if (update.worker != HeldSlice::kEveryWorker) {
    owed_.push_back({update.worker, update.round, kValuePart});
  } else {
    for (int worker = 0; worker < model_.room.options.workers; ++worker) {
      owed_.push_back({worker, update.round, kValuePart});
    }
  }
  answerWhenAllowed();
}

// Answers show only updates that the replica has, or nearly has; workers too far ahead wait.
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
  answerByHelper();
  std::erase_if(owed_, [&](const Answer& owed) {
    const bool may = mayBeAnswered(owed.worker, owed.round);
    if (may) {
      answer(owed);
    }
    return may;
  });
}

bool ServedSlice::mayBeAnswered(int worker, Round round) const {
  const ServerOptions& options = model_.room.options;
  const bool tooFarAhead = options.consistency == Consistency::kAsynchronous &&
      round > std::uint64_t{held_.slowest()} + options.staleness;
  return !tooFarAhead && held_.applied(worker, round);
}

// Lets the helper answer the last group if all members may be answered; else each member is
// answered from here when it may be.
void ServedSlice::answerByHelper() {
  const auto relay = std::exchange(relay_, std::nullopt);
  if (!relay || !model_.room.peers.hasServer(relay->helper)) {
    return;
  }
  if (!std::ranges::all_of(relay->members, [&](const Member& member) {
        return mayBeAnswered(member.worker, member.round);
      })) {
    return tellHelper(relay->helper, relay->group, {});
  }
  tellHelper(relay->helper, relay->group, held_.state().value);
  std::erase_if(owed_, [&](const Answer& owed) {
    return owed.part == kValuePart &&
        std::ranges::find(relay->members, Member{owed.worker, owed.round}) != relay->members.end();
  });
}

// Replies to a helper. Without an answer in the reply, the members get theirs from here.
void ServedSlice::tellHelper(ServerId helper, std::uint32_t group, Payload answer) const {
  FrameHeader header = model_.about(FrameKind::kValue, index_);
  header.flags = kFrameFlagGroup;
  header.round = group;
  header.argument = held_.state().stepsBefore + held_.state().version;
  send({Peer::Kind::kServer, helper}, urgency(), header, std::move(answer));
}

// Drops what is left of a group: its members will ask again, or their requests have been restored.
void ServedSlice::dropGroup() {
  held_.dropGroup();
  if (arrived_) {
    tellHelper(arrived_->helper, arrived_->group, {});
    arrived_.reset();
  }
}

void ServedSlice::answer(const Answer& to) {
  const SliceState& state = held_.state();
  const std::size_t moment = to.part - kValuePart - 1; // not used for the value
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

} // namespace hvd_order
