#pragma once

#include <cstdint>
#include <vector>

#include "servers/slice/slice_context.h"
#include "servers/slice/slice_store.h"
#include "servers/wire/registration.h"

namespace hvd_order {

/// The original's side of replication: sends the replica the state and every update, and decides
/// whether workers may have answers.
///
/// The replica in use is the one that the map names, if it is connected. Not thread-safe.
class SliceReplication {
 public:
  SliceReplication(const SliceContext& context, const SliceStore& store)
      : context_(context), store_(store) {}

  /// The held state has become the original, or is no longer: there is no replica yet.
  void reset();
  /// Records the version of the map by which the original came from another server.
  void cameBy(std::uint32_t map) {
    originalMap_ = map;
  }
  /// A newer map than the version `known` has come. A replica by a map that was not known here is
  /// chosen again.
  void mapChanges(std::uint32_t known) {
    isChosen_ = isChosen_ && originalMap_ <= known;
  }
  /// Uses the replica that the map of this version names: sends it the state, if it is another
  /// than before.
  void choose(ServerId named, std::uint32_t map);
  /// Whether a replica has been chosen, or found missing. Before that an original is on its way to
  /// its owner, which makes the copy.
  [[nodiscard]] bool isChosen() const {
    return isChosen_;
  }
  [[nodiscard]] bool hasReplica() const {
    return replica_ != kNoServer;
  }
  /// Stops waiting for a lost replica.
  void serverGone(ServerId server);

  /// Sends the replica an update that has been applied here; nothing without a replica.
  void send(const SliceStore::AppliedUpdate& update);
  /// Handles the replica's acknowledgement. @return false if it is of a server that is no longer
  /// the replica.
  bool acknowledged(Peer from, const FrameHeader& header);
  /// Whether the replica has every update, or lags by no more than the divergence bound.
  [[nodiscard]] bool permitsAnswers() const;

 private:
  struct Unacknowledged {
    Round version;
    int worker; // the update's worker and round
    Round round;
    double change;
    bool isState; // a whole state, not one update
  };

  void announceSafety() const;
  void updateArrived(const FrameHeader& header);

  const SliceContext& context_;
  const SliceStore& store_;
  ServerId replica_ = kNoServer;
  bool isChosen_ = false;
  std::uint32_t copiedBy_ = 0;                 // version of the map by which the copy was sent
  std::uint32_t originalMap_ = 0;              // version of the map by which the original came
  std::vector<Unacknowledged> unacknowledged_; // what the replica may not have
};

} // namespace hvd_order
