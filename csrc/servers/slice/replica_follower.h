#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "servers/slice/slice_context.h"
#include "servers/slice/slice_store.h"
#include "servers/wire/group.h"

namespace hvd_order {

/// Makes a slice's state follow an original that another server has: applies the same updates.
///
/// Each copy stores which server has its original. A copy that the map does not name is kept until
/// the owner announces that its replica has a copy of its own. Not thread-safe.
class ReplicaFollower {
 public:
  /// An update that the original has made.
  struct ReplicaUpdate {
    Peer from;
    FrameHeader header;
    Payload sum; ///< empty if the update was skipped
    bool isSkipped;
    std::vector<Member> members;
  };

  ReplicaFollower(const SliceContext& context, SliceStore& store)
      : context_(context), store_(store) {}

  /// Installs a state as a copy and acknowledges it. @return false if a newer map has overtaken it.
  bool install(Peer from, const FrameHeader& header, SliceState state);
  /// The held state is a copy from now on, made by this version of the map.
  void begin(ServerId original, std::uint32_t map);
  /// The held state is the original from now on.
  void end();

  /// The server that has the original.
  [[nodiscard]] ServerId original() const {
    return original_;
  }
  void originalMoves(ServerId to) {
    original_ = to;
  }

  /// Reads a frame; needs no lock. @throws FrameError if it does not fit.
  [[nodiscard]] ReplicaUpdate read(Peer from, const FrameHeader& header, Payload payload) const;
  /// Applies an update and acknowledges it. Ignores one that this copy has, or of another server.
  void update(ReplicaUpdate update);
  /// Applies the updates whose rules are known now.
  void advance();

  /// Owner and replica have the slice: copies made by this version of the map, or before, may go.
  void safeSince(std::uint32_t map) {
    safeBefore_ = std::max(safeBefore_, std::uint64_t{map} + 1);
  }
  /// Drops the copy if it may go.
  void dropIfSafe();

 private:
  const SliceContext& context_;
  SliceStore& store_;
  ServerId original_ = kNoServer;
  std::uint32_t map_ = 0;              // version of the map by which the copy was made
  std::uint64_t safeBefore_ = 0;       // copies of older maps may go
  std::vector<ReplicaUpdate> updates_; // wait for their rules
};

} // namespace hvd_order
