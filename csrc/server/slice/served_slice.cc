#include "server/slice/served_slice.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "server/slice/served_model.h"
#include "server/wire/arguments.h"

namespace hvd_order {

namespace {

// Copies for a replica that may lag go when nothing else waits.
constexpr std::uint64_t kWhenIdle = Connection::kLast - 1;

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
    const bool isDirect = admission_ && admission_->helper == Routes::kDirect;
    if (!isDirect || admission_->asks.front().worker != worker ||
        admission_->asks.front().round != header.round) {
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

// Of the original alone.
void ServedSlice::advance() {
  if (arrived_ && std::ranges::any_of(arrived_->asks, [&](const Ask& ask) {
        return held_.applied(ask.worker, ask.round);
      })) { // a state has come that has some of these updates: a sum cannot be taken apart
    askAgain(arrived_->asks);
    dropGroup();
  }
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
    header.flags = update.members.empty() ? std::uint16_t{0} : kFrameFlagGroup;
    send(
        {Peer::Kind::kServer, follower_}, replicaUrgency(), header,
        update.members.empty() ? update.sum : withMembers(update.sum, update.members));
  }
  if (!update.members.empty()) {
    for (const Member& member : update.members) {
      owed_.push_back({member.worker, member.round, kValuePart});
    }
    if (relay_) { // some of it may not be answered yet
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

// To all of the last group, if all may have it: else each is answered when it may.
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

// Without an answer: its members get theirs from here.
void ServedSlice::tellHelper(ServerId helper, std::uint32_t group, Payload answer) const {
  FrameHeader header = model_.about(FrameKind::kValue, index_);
  header.flags = kFrameFlagGroup;
  header.round = group;
  header.argument = held_.state().stepsBefore + held_.state().version;
  send({Peer::Kind::kServer, helper}, urgency(), header, std::move(answer));
}

// Whatever is left of a group here: its members will ask again, or have been asked for.
void ServedSlice::dropGroup() {
  held_.dropGroup();
  if (arrived_) {
    tellHelper(arrived_->helper, arrived_->group, {});
    arrived_.reset();
  }
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

} // namespace hvd_order
