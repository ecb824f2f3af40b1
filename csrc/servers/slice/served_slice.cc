#include "servers/slice/served_slice.h"

#include <shared_mutex>
#include <utility>

#include "base/error.h"
#include "servers/slice/served_model.h"
#include "servers/wire/arguments.h"

// The path of a push through the owner: store it, apply it, copy it to the replica, answer it.
//
// The frame of a push or pull is only stored. `proceed` then does all that map, peers and state
// permit, after each change of any of them, so their order of arrival does not matter. `advance`
// applies every update that is due; each is sent to the replica and owes an answer to every worker
// in it. Answers go when the replica permits them (slice_replication.cc).
//
// Pushes are idempotent: a worker whose push was applied before, by this server or a lost one,
// only gets its answer again.
//
// A move: worker 0's new map names a new owner (`place`). Each worker switches to the map and
// tells every server so (`passOnFromNow` follows the last one). From then on no worker's push can
// be on its way to the old owner, so that server sends the new owner the state, the waiting pushes
// and the answers that it owes (`passOn`). The new owner installs the state and copies it to its
// replica. If the server with the original is lost, a copy becomes the original at the owner by
// the map. If several copies claim to be the last, the one with the most updates is kept
// (`installOriginal`).
//
// Invariants: only the original applies workers' updates. A server that sends the original away
// keeps a copy until the new owner announces that owner and replica have the slice, so with
// replicas a second server has the state at any moment of a move.
namespace hvd_order {

namespace {

std::uint32_t partOf(const FrameHeader& pull) {
  const std::uint32_t part = PullArgument::of(pull).part;
  if (part < kValuePart || part >= kMostParts) {
    throw FrameError(concat("a pull of part ", part, " of a state"));
  }
  return part;
}

void checkRound(const FrameHeader& header) {
  if (header.round == 0) {
    throw FrameError("rounds count from 1");
  }
}

} // namespace

ServedSlice::Work::~Work() {
  const auto freed = slice_.admission_.takeFreed();
  lock_.unlock();
  for (const auto& [windows, sender] : freed) {
    while (const auto next = windows->next(sender)) {
      next->admit();
    }
  }
}

ServedSlice::ServedSlice(ServedModel& model, SliceIndex index)
    : context_(model, index),
      store_(
          model.registration.slices[index],
          model.registration.serversUpdate,
          context_.consistency(),
          model.room.options.workers,
          context_.mayLag()),
      states_(context_),
      follower_(context_, store_),
      replication_(context_, store_),
      answers_(context_, store_),
      admission_(context_, store_, answers_, *this) {}

std::optional<ServedSlice::Report> ServedSlice::report() const {
  const std::scoped_lock lock(mutex_);
  if (!store_.installed()) {
    return std::nullopt;
  }
  return Report{isOwner(), store_.state().version, store_.state().value};
}

std::vector<int> ServedSlice::missing() const {
  const std::scoped_lock lock(mutex_);
  return store_.waits() ? store_.missing() : std::vector<int>{};
}

// ---------------------------------------------------------------------- workers' pushes and pulls

void ServedSlice::push(Peer from, int worker, const FrameHeader& header, Payload payload) {
  if (payload.sizeBytes != context_.sizeBytes()) {
    throw FrameError(concat(
        "a push of ", payload.sizeBytes, " bytes for slice ", context_.index, ", which has ",
        context_.sizeBytes()));
  }
  checkRound(header);
  const Work work(*this);
  if (context_.asksFirst() && !admission_.pushCame(worker, header.round)) {
    return;
  }
  if (from.kind == PeerKind::kServer) {
    passedOn(header);
    store_.needRules(PassedPushArgument::of(header).rules);
  }
  store_.push(worker, header.round, std::move(payload));
  proceed();
}

void ServedSlice::pull(Peer from, int worker, const FrameHeader& header) {
  const std::uint32_t part = partOf(header);
  const Work work(*this);
  if (from.kind == PeerKind::kServer) {
    passedOn(header);
  } else {
    store_.markOver(header.round);
  }
  answers_.queue(worker, header.round, part);
  proceed();
}

void ServedSlice::rulesCame() {
  const Work work(*this);
  follower_.advance();
  proceed();
}

void ServedSlice::ask(int worker, const FrameHeader& header) {
  if (!context_.asksFirst()) {
    throw FrameError("nobody has to ask before a push here");
  }
  checkRound(header);
  const Work work(*this);
  admission_.ask(worker, header);
  proceed();
}

void ServedSlice::groupCame(Peer from, const FrameHeader& header, const Payload& payload) {
  auto [total, members] = splitMembers(payload, context_.sizeBytes(), context_.options().workers);
  const Work work(*this);
  if (admission_.groupCame(from, header.round, std::move(total), std::move(members))) {
    proceed();
  }
}

void ServedSlice::admit() {
  const Work work(*this);
  proceed();
}

void ServedSlice::switched(int worker, std::uint32_t map) {
  if (!context_.asksFirst()) {
    return;
  }
  const Work work(*this);
  admission_.switched(worker, map);
  proceed();
}

void ServedSlice::retire() {
  const Work work(*this);
  admission_.retire();
}

// ----------------------------------------------------------------------------- between servers

void ServedSlice::stateCame(Peer from, const FrameHeader& header, Payload payload) {
  const bool begins = StateReceiver::begins(from, header);
  const Work work(*this);
  if (begins && store_.installed()) {
    throw FrameError("a slice that begins twice");
  }
  auto state = states_.take(from, header, std::move(payload));
  if (!state) {
    return;
  }
  if (!StateArgument::of(header).isCopy) {
    installOriginal(header, std::move(*state));
  } else if (!isOriginal() && follower_.install(from, header, std::move(*state))) {
    original_ = false;
  }
  proceed();
}

void ServedSlice::copyCame(Peer from, const FrameHeader& header, Payload payload) {
  auto update = follower_.read(from, header, std::move(payload));
  const Work work(*this);
  if (isCopy()) {
    follower_.update(std::move(update));
  }
}

void ServedSlice::copyArrived(Peer from, const FrameHeader& header) {
  const Work work(*this);
  if ((header.argument & kSafeMark) != 0) {
    follower_.safeSince(header.map);
  } else if (!replication_.acknowledged(from, header)) {
    return;
  }
  proceed();
}

void ServedSlice::place(SliceOwners place, std::uint32_t map, bool allSwitched, bool begins) {
  const Work work(*this);
  replication_.mapChanges(map_);
  map_ = map;
  place_ = place;
  passesOn_ = allSwitched;
  if (begins && isOwner() && !store_.installed() && !context_.model.registration.serversUpdate) {
    store_.begin({}); // before the first sum a slice has no state
    becomeOriginal();
  }
  proceed();
}

void ServedSlice::passOnFromNow() {
  const Work work(*this);
  passesOn_ = true;
  proceed();
}

// Stops waiting for a lost replica or helper; a copy whose original is lost becomes the original.
void ServedSlice::serverGone(ServerId server) {
  const Work work(*this);
  states_.forget(server);
  replication_.serverGone(server);
  admission_.helperGone(server);
  proceed();
}

void ServedSlice::peersChanged() {
  const Work work(*this);
  proceed();
}

// ------------------------------------------------------------------------------ what is permitted

// Does everything that map, peers and state permit; called after any of them has changed.
void ServedSlice::proceed() {
  const Peers& peers = context_.peers();
  const bool ownerIsThere = !isOwner() && peers.hasServer(place_.owner);
  if (isCopy()) {
    follower_.dropIfSafe();
  }
  if (isCopy() && !peers.hasServer(follower_.original())) {
    if (isOwner()) {
      becomeOriginal();
    } else if (ownerIsThere) { // the owner was to get the original from the lost server
      sendState(context_, store_.state(), place_.owner, context_.urgency(), map_, /*isCopy=*/false);
      follower_.originalMoves(place_.owner);
    }
  }
  if (isOriginal()) {
    if (isOwner()) {
      replication_.choose(place_.replica, map_);
    }
    if (replication_.isChosen()) { // else it is on its way to its owner, which makes the copy
      advance();
      if (context_.asksFirst()) {
        admission_.admitNext();
        advance();
      }
    }
  }
  if (ownerIsThere && passesOn_) {
    passOn();
  }
}

// For the original only: applies what is due, and answers.
void ServedSlice::advance() {
  admission_.dropGroupIfApplied();
  for (const auto& [worker, round] : store_.takeApplied()) {
    answers_.queue(worker, round, kValuePart); // the answer was lost with another server
  }
  const ServedModel& model = context_.model;
  const std::shared_lock lock(model.rulesMutex);
  while (const auto update = applyNext(model.rules)) {
    afterUpdate(*update);
  }
  answerWhenAllowed();
}

std::optional<SliceStore::AppliedUpdate> ServedSlice::applyNext(const RuleBook& rules) {
  const bool measureChange = context_.mayLag() && replication_.hasReplica();
  Recording<UpdateTimes>& updates = context_.model.room.updates;
  if (!updates.isOn()) {
    return store_.advance(rules, measureChange);
  }
  const std::int64_t beginNs = steadyNs();
  auto update = store_.advance(rules, measureChange);
  if (update && update->sum) { // else an update was skipped
    updates.add({context_.sizeBytes(), beginNs, steadyNs(), threadNumber()});
  }
  return update;
}

void ServedSlice::afterUpdate(const SliceStore::AppliedUpdate& update) {
  replication_.send(update);
  if (update.members.empty()) {
    answers_.queue(update);
  } else {
    answers_.queue(admission_.takeApplied(), update.members);
  }
  answerWhenAllowed();
}

void ServedSlice::answerWhenAllowed() {
  if (replication_.permitsAnswers()) {
    answers_.send();
  }
}

// ------------------------------------------------------------------------------------------ moves

void ServedSlice::becomeOriginal() {
  original_ = true;
  follower_.end();
  replication_.reset();
}

void ServedSlice::installOriginal(const FrameHeader& header, SliceState state) {
  passedOn(header);
  // After a loss several servers may take their copy for the last one: the copy with the most
  // updates is right.
  if (!store_.installed() || store_.isBehind(state)) {
    store_.install(std::move(state));
  }
  becomeOriginal(); // copies again: the sender's replica may lack the last update
  replication_.cameBy(header.map);
}

// A server passes frames on by its map. If its map is newer than ours, we must not send them back.
void ServedSlice::passedOn(const FrameHeader& header) {
  if (header.map > map_) {
    passesOn_ = false;
  }
}

// Sends the owner everything that is here. A copy stays until the owner's replica has one.
void ServedSlice::passOn() {
  if (isOriginal()) {
    sendState(
        context_, store_.state(), place_.owner, context_.urgency(), map_,
        /*isCopy=*/false);
    original_ = false;
    follower_.begin(place_.owner, map_);
    replication_.reset();
  }
  passPushesOn();
  answers_.passOn(place_.owner, map_);
}

void ServedSlice::passPushesOn() {
  RulesNumber rules = 0; // number of the rules that the new owner must have
  {
    const ServedModel& model = context_.model;
    const std::shared_lock lock(model.rulesMutex);
    rules = model.rules.empty() ? 0 : model.rules.rbegin()->first;
  }
  const auto waiting = store_.takeWaiting();
  admission_.dropGroup();
  answers_.giveUpHelper();
  if (context_.asksFirst()) {
    return; // the workers ask the new owner
  }
  for (std::size_t worker = 0; worker < waiting.size(); ++worker) {
    if (waiting[worker].gradient) {
      FrameHeader push = context_.about(FrameKind::kPush);
      push.round = waiting[worker].round;
      push.map = map_;
      push.argument = PassedPushArgument{rules, static_cast<std::uint32_t>(worker)}.packed();
      context_.send(
          {PeerKind::kServer, place_.owner}, context_.urgency(), push, waiting[worker].gradient);
    }
  }
}

} // namespace hvd_order
