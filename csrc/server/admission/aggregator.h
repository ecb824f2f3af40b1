#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>

#include "server/wire/frame.h"
#include "server/wire/group.h"
#include "server/wire/payload.h"

namespace hvd_order {

struct ServerRoom;

/// A helper on the way to other servers: adds up what several workers push for one of them, sends
/// it the sum, and passes its answer on to all of these workers. So the owner's line carries one
/// update and one answer for all.
///
/// To each sum the owner says one word: the answer for all, or that it answers them itself. A group
/// that is not whole when a later one of its slice begins has been given up.
///
/// Thread safety: all methods may be called from any thread.
class Aggregator {
 public:
  explicit Aggregator(const ServerRoom& room) : room_(room) {}

  /// A worker's push for a group. @throws FrameError if it is no such thing.
  void add(int worker, const FrameHeader& header, Payload payload, const SliceShape& shape);
  /// The owner's answer to a group; empty if there is none for all.
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
    Payload gradient; // until the sum is made
  };
  struct Group {
    bool isSent = false;
    std::map<int, Part> parts; // by worker
  };

  const ServerRoom& room_;
  std::mutex mutex_; // guards what follows
  std::map<Where, Group> groups_;
};

} // namespace hvd_order
