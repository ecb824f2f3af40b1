#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>

#include "servers/wire/frame.h"
#include "servers/wire/group.h"
#include "servers/wire/options.h"
#include "servers/wire/payload.h"
#include "servers/wire/peers.h"

namespace hvd_order {

/// A helper: adds the pushes of several workers for one owner, sends the owner the sum, and passes
/// the owner's answer on to all of these workers. The owner's link then carries one update and one
/// answer for all of them.
///
/// The owner replies to each sum exactly once: with the answer for all workers, or with an empty
/// payload if it answers the workers itself. A group that is incomplete when a later group of its
/// slice begins has been given up.
///
/// Thread safety: all methods may be called from any thread.
class Aggregator {
 public:
  Aggregator(const ServerOptions& options, const Peers& peers) : options_(options), peers_(peers) {}

  /// Adds a worker's push to its group. @throws FrameError if the frame is not a valid group push.
  void add(int worker, const FrameHeader& header, Payload payload, const SliceShape& shape);
  /// Passes on the owner's answer to a group. An empty payload means that the owner answers the
  /// workers itself.
  void passOn(ServerId owner, const FrameHeader& header, const Payload& payload);
  void ownerGone(ServerId owner);
  void retire(ModelId model, std::uint32_t layout);

 private:
  struct Where {
    ServerId owner;
    ModelId model;
    std::uint32_t layout;
    SliceIndex slice;
    std::uint32_t number = 0; // of the group
    friend auto operator<=>(const Where&, const Where&) = default;
    [[nodiscard]] bool hasSlice(const Where& other) const;
  };
  struct Part {
    Round round;
    Payload gradient; // released when the sum is made
  };
  struct OpenGroup {
    bool isSent = false;
    std::map<int, Part> parts; // by worker
  };

  const ServerOptions& options_;
  const Peers& peers_;
  std::mutex mutex_; // guards `groups_`
  std::map<Where, OpenGroup> groups_;
};

} // namespace hvd_order
