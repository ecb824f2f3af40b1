#include <algorithm>
#include <limits>
#include <shared_mutex>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "server/slice/served_model.h"
#include "server/slice/served_slice.h"
#include "server/wire/arguments.h"

// Moves slices between servers and keeps their copies.
//
// A move: worker 0's new map names a new owner (`place`). Each worker switches to the map and
// tells every server so (`passOnFromNow` follows the last one). From then on no worker's push can
// be on its way to the old owner, so that server sends the new owner the state, the waiting pushes
// and the answers that it owes (`passOn`). The new owner installs the state and copies it to its
// replica (`copyToReplica`).
//
// Invariants: only the original applies workers' updates. A server that sends the original away
// keeps a copy until the new owner announces that owner and replica have the slice
// (`sayItIsSafe`), so with replicas a second server has the state at any moment of a move.
// served_slice.cc says what the replica must have before a worker gets an answer.
//
// If the server with the original is lost, a copy becomes the original at the owner by the map. If
// several copies claim to be the last, the one with the most updates is kept (`installOriginal`).
//
// `settleNow` does all that map, peers and state permit, after each change of any of them, so
// their order of arrival does not matter.
namespace hvd_order {

namespace {

// Most steps that an optimizer may have taken.
constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 53;

Payload counters(const SliceState& state) {
  ByteWriter out;
  out.put(state.stepsBefore);
  for (const auto* rounds : {&state.seen, &state.skipped}) {
    for (const Round round : *rounds) {
      out.put(round);
    }
  }
  return Payload::copyOf(out.bytes());
}

} // namespace

void ServedSlice::place(Placement place, std::uint32_t map, bool allSwitched, bool begins) {
  const Work work(*this);
  announced_ = announced_ && originalMap_ <= map_;
  map_ = map;
  place_ = place;
  passesOn_ = allSwitched;
  if (begins && place_.owner == model_.room.options.server && !held_.installed() &&
      !model_.registration.serversUpdate) {
    held_.begin({}); // before the first sum a slice has no state
    becomeOriginal();
  }
  settleNow();
}

void ServedSlice::passOnFromNow() {
  const Work work(*this);
  passesOn_ = true;
  settleNow();
}

// Stops waiting for a lost replica; a copy whose original is lost becomes the original.
void ServedSlice::serverGone(ServerId server) {
  const Work work(*this);
  for (const bool isCopy : {false, true}) {
    incoming_.erase({{Peer::Kind::kServer, server}, isCopy});
  }
  if (follower_ == server) {
    follower_ = kNoServer;
    unacknowledged_.clear();
  }
  if (admission_ && admission_->helper == server) {
    giveUpAdmission();
  }
  settleNow();
}

void ServedSlice::settle() {
  const Work work(*this);
  settleNow();
}

void ServedSlice::becomeOriginal() {
  original_ = true;
  source_ = kNoServer;
  follower_ = kNoServer;
  unacknowledged_.clear();
  copies_.clear(); // no worker has an answer that includes these
  announced_ = false;
}

// A server passes frames on by its map. If its map is newer than ours, we must not send them back.
void ServedSlice::passedOn(const FrameHeader& header) {
  if (header.map > map_) {
    passesOn_ = false;
  }
}

// Does everything that map, peers and state permit; called after any of them has changed.
void ServedSlice::settleNow() {
  const Peers& peers = model_.room.peers;
  const bool isOwner = place_.owner == model_.room.options.server;
  const bool ownerIsThere = !isOwner && peers.hasServer(place_.owner);
  if (isCopy() && copyMap_ < safeBefore_) {
    held_.uninstall(); // another server has a later copy; one will come if the map names us
    copies_.clear();
  }
  if (isCopy() && !peers.hasServer(source_)) {
    if (isOwner) {
      becomeOriginal();
    } else if (ownerIsThere) { // the owner was to get the original from the lost server
      sendState(place_.owner, urgency(), 0);
      source_ = place_.owner;
    }
  }
  if (isOriginal()) {
    if (isOwner) {
      copyToReplica();
    }
    if (announced_) { // else it is on its way to its owner, which makes the copy
      advance();
      if (asksFirst()) {
        admitNext();
        advance();
      }
    }
  }
  if (ownerIsThere && passesOn_) {
    passOn();
  }
}

void ServedSlice::copyToReplica() {
  const ServerId replica = model_.room.peers.hasServer(place_.replica) ? place_.replica : kNoServer;
  if (replica == follower_ && announced_) {
    return;
  }
  announced_ = true;
  follower_ = replica;
  copiedBy_ = map_;
  unacknowledged_.clear();
  if (replica == kNoServer) {
    sayItIsSafe();
    return;
  }
  unacknowledged_.push_back(
      {held_.state().version, HeldSlice::kEveryWorker, 0, std::numeric_limits<double>::infinity(),
       /*isState=*/true});
  sendState(replica, replicaUrgency(), kCopyMark);
}

void ServedSlice::sayItIsSafe() {
  if (copiedBy_ == 0) {
    return; // no server had the slice before
  }
  FrameHeader header = model_.about(FrameKind::kReplicaDone, index_);
  header.map = copiedBy_;
  header.argument = kSafeMark;
  for (const Peer server : model_.room.peers.all(Peer::Kind::kServer)) {
    if (server.number != follower_) {
      send(server, urgency(), header, {});
    }
  }
}

// Sends the owner everything that is here. A copy stays until the owner's replica has one.
void ServedSlice::passOn() {
  const Peer owner{Peer::Kind::kServer, place_.owner};
  if (isOriginal()) {
    sendState(place_.owner, urgency(), 0);
    original_ = false;
    source_ = place_.owner;
    copyMap_ = map_;
    follower_ = kNoServer;
    unacknowledged_.clear();
  }
  std::uint64_t rules = 0; // number of the rules that the new owner must have
  {
    const std::shared_lock lock(model_.rulesMutex);
    rules = model_.rules.empty() ? 0 : model_.rules.rbegin()->first;
  }
  const auto waiting = held_.takeWaiting();
  dropGroup();
  if (const auto relay = std::exchange(relay_, std::nullopt)) {
    tellHelper(relay->helper, relay->group, {});
  }
  for (std::size_t worker = 0; worker < waiting.size(); ++worker) {
    if (waiting[worker].gradient && !asksFirst()) { // else its worker asks the new owner
      FrameHeader push = model_.about(FrameKind::kPush, index_);
      push.round = waiting[worker].round;
      push.map = map_;
      push.argument = rules << kPartBits | worker;
      send(owner, urgency(), push, waiting[worker].gradient);
    }
  }
  for (const Answer& owed : std::exchange(owed_, {})) {
    FrameHeader pull = model_.about(FrameKind::kPull, index_);
    pull.round = owed.round;
    pull.map = map_;
    pull.argument = std::uint64_t{owed.part} << kPartBits | static_cast<std::uint64_t>(owed.worker);
    send(owner, urgency(), pull, {});
  }
}

void ServedSlice::sendState(ServerId to, std::uint64_t urgency, std::uint64_t mark) {
  const SliceState& state = held_.state();
  std::vector<Payload> parts{counters(state)};
  if (state.value) {
    parts.push_back(state.value);
    parts.insert(parts.end(), state.moments.begin(), state.moments.end());
  }
  FrameHeader header = model_.about(FrameKind::kState, index_);
  header.round = state.version;
  header.map = map_;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    header.argument = mark | std::uint64_t{parts.size()} << kPartBits | part;
    send({Peer::Kind::kServer, to}, urgency, header, parts[part]);
  }
}

void ServedSlice::stateCame(Peer from, const FrameHeader& header, Payload payload) {
  const bool isCopy = (header.argument & kCopyMark) != 0;
  // Worker 0 sends the initial state of a slice; later states come from servers.
  const bool begins = from == Peer{Peer::Kind::kWorker, 0};
  if (!begins && from.kind != Peer::Kind::kServer) {
    throw FrameError("such a frame comes from others");
  }
  if (begins && (isCopy || header.round != 0)) {
    throw FrameError("a slice that begins with what is no beginning");
  }
  const Work work(*this);
  if (begins && held_.installed()) {
    throw FrameError("a slice that begins twice");
  }
  auto state = takePart(from, header, std::move(payload));
  if (!state) {
    return;
  }
  const bool isNew =
      std::all_of(state->seen.begin(), state->seen.end(), [](Round seen) { return seen == 0; });
  if (state->stepsBefore > kMostSteps || (begins && !isNew)) {
    throw FrameError("a state of impossible steps");
  }
  isCopy ? installCopy(from, header, std::move(*state))
         : installOriginal(header, std::move(*state));
  settleNow();
}

// @return the whole state once its last part has come.
std::optional<SliceState>
ServedSlice::takePart(Peer from, const FrameHeader& header, Payload payload) {
  const bool isCopy = (header.argument & kCopyMark) != 0;
  const auto part = static_cast<std::uint32_t>(header.argument);
  const auto parts = static_cast<std::uint32_t>((header.argument & ~kCopyMark) >> kPartBits);
  const bool updates = model_.registration.serversUpdate;
  const std::uint32_t least = updates ? kValuePart + 1 : 1;
  const std::uint32_t most = updates ? kMostParts : kValuePart + 1;
  const auto workers = static_cast<std::size_t>(model_.room.options.workers);
  const std::size_t expected =
      part == kCountersPart ? sizeof(std::uint64_t) + 2 * sizeof(Round) * workers : sizeBytes();
  if (parts < least || parts > most || part >= parts || payload.sizeBytes != expected) {
    throw FrameError(concat("part ", part, " of ", parts, " of a state, of ", payload.sizeBytes));
  }
  auto& incoming = incoming_[{from, isCopy}];
  incoming.resize(parts);
  incoming[part] = std::move(payload);
  if (part + 1 < parts) {
    return std::nullopt;
  }
  const Parts arrived = std::move(incoming_.extract({from, isCopy}).mapped());
  if (!std::all_of(arrived.begin(), arrived.end(), [](const auto& p) { return p.has_value(); })) {
    throw FrameError("parts of a state are missing");
  }
  SliceState state;
  state.version = header.round;
  ByteReader in({arrived.front()->data(), arrived.front()->sizeBytes});
  state.stepsBefore = in.get<std::uint64_t>();
  for (auto* rounds : {&state.seen, &state.skipped}) {
    for (std::size_t worker = 0; worker < workers; ++worker) {
      rounds->push_back(in.get<Round>());
    }
  }
  if (parts > kValuePart) {
    state.value = *arrived[kValuePart];
  }
  for (std::uint32_t moment = kValuePart + 1; moment < parts; ++moment) {
    state.moments.push_back(*arrived[moment]);
  }
  return state;
}

void ServedSlice::installOriginal(const FrameHeader& header, SliceState state) {
  passedOn(header);
  // After a loss several servers may take their copy for the last one: the copy with the most
  // updates is right.
  if (!held_.installed() || held_.isBehind(state)) {
    held_.install(std::move(state));
  }
  becomeOriginal(); // copies again: the sender's replica may lack the last update
  originalMap_ = header.map;
}

void ServedSlice::installCopy(Peer from, const FrameHeader& header, SliceState state) {
  // Whether our map names this server does not matter: the sender's map may differ. If in the end
  // no map names this server, the owner will announce that the copy may go.
  if (isOriginal() || header.map < copyMap_) {
    return; // overtaken by a newer map
  }
  held_.install(std::move(state));
  original_ = false;
  source_ = static_cast<ServerId>(from.number);
  copyMap_ = header.map;
  copies_.clear();
  FrameHeader done = header;
  done.kind = FrameKind::kReplicaDone;
  done.payloadBytes = 0;
  done.argument = kCopyMark | header.round;
  send(from, urgency(), done, {});
}

void ServedSlice::copyCame(Peer from, const FrameHeader& header, Payload payload) {
  const bool isSkipped = asksFirst() && payload.sizeBytes == 0;
  std::vector<Member> members;
  if ((header.flags & kFrameFlagGroup) != 0) {
    std::tie(payload, members) = splitMembers(payload, sizeBytes(), model_.room.options.workers);
  }
  if (payload.sizeBytes != sizeBytes() && !isSkipped) {
    throw FrameError(concat("a copy of ", payload.sizeBytes, " bytes of slice ", index_));
  }
  const std::uint64_t worker = header.argument >> kPartBits;
  if (worker > static_cast<std::uint64_t>(model_.room.options.workers) ||
      (isSkipped && worker == 0)) {
    throw FrameError("a copy of nobody's push");
  }
  const Work work(*this);
  // Otherwise the original has moved meanwhile, perhaps to this server and back.
  const Round version = held_.state().version + (isSkipped ? 0 : 1);
  if (isCopy() && source_ == from.number && static_cast<Round>(header.argument) >= version) {
    copies_.push_back(
        {from, header, isSkipped ? Payload{} : std::move(payload), std::move(members)});
    followCopies();
  }
}

void ServedSlice::followCopies() {
  const std::shared_lock rulesLock(model_.rulesMutex);
  while (!copies_.empty()) {
    const Copied next = std::move(copies_.front());
    copies_.erase(copies_.begin()); // an update that does not fit now never will
    const auto version = static_cast<Round>(next.header.argument);
    const int worker = static_cast<int>(next.header.argument >> kPartBits) - 1;
    const HeldSlice::Update update{next.header.round, worker,      next.sum, 0,
                                   next.header.map,   next.members};
    if (!held_.follow(update, version, model_.rules)) {
      copies_.insert(copies_.begin(), next);
      return;
    }
    FrameHeader done = next.header;
    done.kind = FrameKind::kReplicaDone;
    done.flags = 0;
    done.payloadBytes = 0;
    send(next.from, urgency(), done, {});
  }
}

void ServedSlice::copyArrived(Peer from, const FrameHeader& header) {
  const Work work(*this);
  if ((header.argument & kSafeMark) != 0) {
    safeBefore_ = std::max(safeBefore_, std::uint64_t{header.map} + 1);
    return settleNow();
  }
  if (from.number != follower_) {
    return; // the sender was the follower before
  }
  const auto version = static_cast<Round>(header.argument);
  const bool isState = (header.argument & kCopyMark) != 0;
  if (isState && header.map == copiedBy_) {
    const auto arrived = std::erase_if(unacknowledged_, [&](const Unacknowledged& sent) {
      return sent.isState && sent.version <= version;
    });
    if (arrived > 0) {
      sayItIsSafe();
    }
  } else if (!isState) {
    // Updates arrive in the order in which they were sent. A skipped update has the version of the
    // one before it.
    const int worker = static_cast<int>(header.argument >> kPartBits) - 1;
    const auto arrived =
        std::find_if(unacknowledged_.begin(), unacknowledged_.end(), [&](const auto& sent) {
          return !sent.isState && sent.version == version && sent.worker == worker &&
              sent.round == header.round;
        });
    if (arrived != unacknowledged_.end()) {
      unacknowledged_.erase(unacknowledged_.begin(), std::next(arrived));
    }
  }
  settleNow();
}

} // namespace hvd_order
