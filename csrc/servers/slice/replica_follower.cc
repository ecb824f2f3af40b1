#include "servers/slice/replica_follower.h"

#include <shared_mutex>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "servers/slice/served_model.h"
#include "servers/wire/arguments.h"

// The copy's side of replication; slice_replication.cc is the original's.
//
// The original sends its state once and then every update, over one connection and in order. An
// update carries the sum of the gradients, not the result: the copy applies it by the same rules
// (SliceStore::follow), so parameters and moments need not travel. Updates whose rules have not
// come yet wait in order; worker 0 sends rules to every server.
//
// Whether the map here names this server does not matter when a copy comes, because the sender's
// map may differ. If in the end no map names this server, the owner announces that the copy may
// go.
//
// Invariants: a copy is the original's state after some number of its updates, without gaps; and
// an acknowledged update is in the copy. A copy whose server has become the owner ends its life as
// a copy and drops the updates that wait: no worker has an answer that includes them.
namespace hvd_order {

bool ReplicaFollower::install(Peer from, const FrameHeader& header, SliceState state) {
  if (header.map < map_) {
    return false;
  }
  store_.install(std::move(state));
  begin(static_cast<ServerId>(from.number), header.map);
  FrameHeader done = header;
  done.kind = FrameKind::kReplicaDone;
  done.payloadBytes = 0;
  done.argument = StateArgument{0, header.round, /*isCopy=*/true}.packed();
  context_.send(from, context_.urgency(), done, {});
  return true;
}

void ReplicaFollower::begin(ServerId original, std::uint32_t map) {
  original_ = original;
  map_ = map;
  updates_.clear();
}

void ReplicaFollower::end() {
  original_ = kNoServer;
  updates_.clear();
}

ReplicaFollower::ReplicaUpdate
ReplicaFollower::read(Peer from, const FrameHeader& header, Payload payload) const {
  const bool isSkipped = context_.asksFirst() && payload.sizeBytes == 0;
  const int workers = context_.options().workers;
  const std::uint32_t sizeBytes = context_.sizeBytes();
  std::vector<Member> members;
  if ((header.flags & kFrameFlagGroup) != 0) {
    std::tie(payload, members) = splitMembers(payload, sizeBytes, workers);
  }
  if (payload.sizeBytes != sizeBytes && !isSkipped) {
    throw FrameError(concat("a copy of ", payload.sizeBytes, " bytes of slice ", context_.index));
  }
  const std::uint32_t worker = ReplicaArgument::of(header).workerPlusOne;
  if (worker > static_cast<std::uint32_t>(workers) || (isSkipped && worker == 0)) {
    throw FrameError("a copy of nobody's push");
  }
  return {from, header, isSkipped ? Payload{} : std::move(payload), isSkipped, std::move(members)};
}

void ReplicaFollower::update(ReplicaUpdate update) {
  // Otherwise the original has moved meanwhile, perhaps to this server and back.
  const Round version = store_.state().version + (update.isSkipped ? 0 : 1);
  if (original_ == update.from.number && ReplicaArgument::of(update.header).version >= version) {
    updates_.push_back(std::move(update));
    advance();
  }
}

void ReplicaFollower::advance() {
  const std::shared_lock rulesLock(context_.model.rulesMutex);
  while (!updates_.empty()) {
    const ReplicaUpdate next = std::move(updates_.front());
    updates_.erase(updates_.begin()); // an update that does not fit now never will
    const auto argument = ReplicaArgument::of(next.header);
    const SliceStore::AppliedUpdate update{next.header.round, argument.worker(), next.sum, 0,
                                           next.header.map,   next.members};
    if (!store_.follow(update, argument.version, context_.model.rules)) {
      updates_.insert(updates_.begin(), next);
      return;
    }
    FrameHeader done = next.header;
    done.kind = FrameKind::kReplicaDone;
    done.flags = 0;
    done.payloadBytes = 0;
    context_.send(next.from, context_.urgency(), done, {});
  }
}

void ReplicaFollower::dropIfSafe() {
  if (map_ < safeBefore_) {
    store_.uninstall(); // another server has a later copy; one will come if the map names us
    updates_.clear();
  }
}

} // namespace hvd_order
