#include "servers/slice/slice_replication.h"

#include <algorithm>
#include <limits>

#include "servers/slice/state_parts.h"
#include "servers/wire/arguments.h"

// Primary-backup replication of one slice (Alsberg and Day 1976); replica_follower.cc is the
// backup.
//
// The owner sends the replica its state once, and then every update in the order in which it
// applied them. What the replica has not acknowledged stays in `unacknowledged_`.
//
// Invariant: an answer shows only updates that the replica has. With a divergence bound, which
// applies only where servers update parameters, it may show others as long as the norms of their
// changes add up to no more than the bound. A state under way counts as infinite.
//
// Servers that had the slice before keep their copies until the replica has its own. When its
// acknowledgement of the state comes, or when there is no replica to wait for, all servers are
// told that the slice is safe (`announceSafety`), and the old copies go. So with replicas a second
// server has the state at any moment of a move.
//
// An original that moved here by a map that was unknown here may have been copied to the replica
// of an older map: when the map comes, the replica is chosen again and gets the state once more.
namespace hvd_order {

void SliceReplication::reset() {
  replica_ = kNoServer;
  isChosen_ = false;
  unacknowledged_.clear();
}

void SliceReplication::choose(ServerId named, std::uint32_t map) {
  const ServerId replica = context_.peers().hasServer(named) ? named : kNoServer;
  if (replica == replica_ && isChosen_) {
    return;
  }
  isChosen_ = true;
  replica_ = replica;
  copiedBy_ = map;
  unacknowledged_.clear();
  if (replica == kNoServer) {
    return announceSafety();
  }
  unacknowledged_.push_back(
      {store_.state().version, SliceStore::kEveryWorker, 0, std::numeric_limits<double>::infinity(),
       /*isState=*/true});
  sendState(
      context_, store_.state(), replica, context_.replicaUrgency(), map,
      /*isCopy=*/true);
}

void SliceReplication::serverGone(ServerId server) {
  if (replica_ == server) {
    replica_ = kNoServer;
    unacknowledged_.clear();
  }
}

void SliceReplication::announceSafety() const {
  if (copiedBy_ == 0) {
    return; // no server had the slice before
  }
  FrameHeader header = context_.about(FrameKind::kReplicaDone);
  header.map = copiedBy_;
  header.argument = kSafeMark;
  for (const Peer server : context_.peers().all(PeerKind::kServer)) {
    if (server.number != replica_) {
      context_.send(server, context_.urgency(), header, {});
    }
  }
}

void SliceReplication::send(const SliceStore::AppliedUpdate& update) {
  if (!hasReplica()) {
    return;
  }
  const Round version = store_.state().version;
  unacknowledged_.push_back(
      {version, update.worker, update.round, update.change, /*isState=*/false});
  FrameHeader header = context_.about(FrameKind::kReplica);
  header.round = update.round;
  header.map = update.rules;
  header.argument =
      ReplicaArgument{static_cast<std::uint32_t>(update.worker + 1), version}.packed();
  header.flags = update.members.empty() ? std::uint16_t{0} : kFrameFlagGroup;
  context_.send(
      {PeerKind::kServer, replica_}, context_.replicaUrgency(), header,
      update.members.empty() ? update.sum : withMembers(update.sum, update.members));
}

bool SliceReplication::acknowledged(Peer from, const FrameHeader& header) {
  if (from.number != replica_) {
    return false;
  }
  if (const auto state = StateArgument::of(header); !state.isCopy) {
    updateArrived(header);
  } else if (header.map == copiedBy_) {
    const Round version = state.part;
    const auto arrived = std::erase_if(unacknowledged_, [&](const Unacknowledged& sent) {
      return sent.isState && sent.version <= version;
    });
    if (arrived > 0) {
      announceSafety();
    }
  }
  return true;
}

// Updates arrive in the order in which they were sent. A skipped update has the version of the one
// before it.
void SliceReplication::updateArrived(const FrameHeader& header) {
  const auto argument = ReplicaArgument::of(header);
  const auto arrived =
      std::find_if(unacknowledged_.begin(), unacknowledged_.end(), [&](const auto& sent) {
        return !sent.isState && sent.version == argument.version &&
            sent.worker == argument.worker() && sent.round == header.round;
      });
  if (arrived != unacknowledged_.end()) {
    unacknowledged_.erase(unacknowledged_.begin(), std::next(arrived));
  }
}

bool SliceReplication::permitsAnswers() const {
  if (!context_.mayLag()) {
    return unacknowledged_.empty();
  }
  double lag = 0;
  for (const Unacknowledged& update : unacknowledged_) {
    lag += update.change;
  }
  return lag <= context_.options().divergenceBound;
}

} // namespace hvd_order
