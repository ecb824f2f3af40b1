#pragma once

#include <cstdint>

#include "servers/arithmetic/update_rule.h"
#include "servers/wire/frame.h"
#include "servers/wire/registration.h"

// Meaning of a header's `argument` by kind of frame, for frames about slices. Of the kinds without
// a type here it is one number:
// - kRule: number of the rules; `round` is the first round for which they hold.
// - kAsk: steps that the worker's parameters include. kValue: steps that the value includes. Both
//   count the steps before the model was registered. The `map` of a kValue that a slice's owner
//   sends to a worker is the part: an answer to one pull must not be taken for that to the next.
// - kAdmit without kFrameFlagGroup: 0.
// Between servers, the `round` of kPush and kValue with kFrameFlagGroup is the group's number, and
// the payloads of kPush and kReplica end with the members (group.h).
namespace hvd_order {

// A state travels in parts: its counters, its value, then the optimizer's moments.
constexpr std::uint32_t kCountersPart = 0;
constexpr std::uint32_t kValuePart = 1;
constexpr std::uint32_t kMostParts = 2 + kMostMoments;

/// Two numbers of 32 bits in one argument.
constexpr std::uint64_t packHalves(std::uint32_t high, std::uint32_t low) {
  return std::uint64_t{high} << 32 | low;
}
constexpr std::uint32_t highHalf(std::uint64_t argument) {
  return static_cast<std::uint32_t>(argument >> 32);
}
constexpr std::uint32_t lowHalf(std::uint64_t argument) {
  return static_cast<std::uint32_t>(argument);
}

/// kState, and the kReplicaDone that acknowledges a whole state.
struct StateArgument {
  static constexpr std::uint32_t kCopyMark = std::uint32_t{1} << 31;

  std::uint32_t parts; ///< number of parts; 0 in an acknowledgement
  std::uint32_t part;  ///< the version of the state in an acknowledgement
  bool isCopy = false; ///< the original stays with the sender

  static constexpr StateArgument of(const FrameHeader& header) {
    const std::uint32_t high = highHalf(header.argument);
    return {high & ~kCopyMark, lowHalf(header.argument), (high & kCopyMark) != 0};
  }
  [[nodiscard]] constexpr std::uint64_t packed() const {
    return packHalves(parts | (isCopy ? kCopyMark : 0), part);
  }
};

/// kPull.
struct PullArgument {
  std::uint32_t part;
  std::uint32_t worker = 0; ///< who gets the answer, if a server passes the pull on

  static constexpr PullArgument of(const FrameHeader& header) {
    return {highHalf(header.argument), lowHalf(header.argument)};
  }
  [[nodiscard]] constexpr std::uint64_t packed() const {
    return packHalves(part, worker);
  }
};

/// kPush that a server passes on.
struct PassedPushArgument {
  RulesNumber rules; ///< the latest ones, without which nothing may be applied
  std::uint32_t worker;

  static constexpr PassedPushArgument of(const FrameHeader& header) {
    return {highHalf(header.argument), lowHalf(header.argument)};
  }
  [[nodiscard]] constexpr std::uint64_t packed() const {
    return packHalves(rules, worker);
  }
};

/// kReplica, and the kReplicaDone that acknowledges an update.
struct ReplicaArgument {
  std::uint32_t workerPlusOne; ///< whose update it is; 0: a whole round
  Round version;               ///< of the slice, after the update

  static constexpr ReplicaArgument of(const FrameHeader& header) {
    return {highHalf(header.argument), lowHalf(header.argument)};
  }
  [[nodiscard]] constexpr std::uint64_t packed() const {
    return packHalves(workerPlusOne, version);
  }
  [[nodiscard]] constexpr int worker() const { ///< -1: a whole round
    return static_cast<int>(workerPlusOne) - 1;
  }
};

/// kReplicaDone to all servers: owner and replica have the slice; any other server may drop its
/// copy.
constexpr std::uint64_t kSafeMark = std::uint64_t{1} << 62;

/// kPush and kAdmit with kFrameFlagGroup, between worker and server: a group of updates that a
/// helper adds, and the other server concerned.
struct GroupArgument {
  ServerId server; ///< the owner, in a frame to the helper; the helper, in a frame to a worker
  std::uint16_t members;
  std::uint32_t number; ///< number of the group, counted by slice at its owner

  static constexpr GroupArgument of(const FrameHeader& header) {
    return {
        static_cast<ServerId>(header.argument >> 48),
        static_cast<std::uint16_t>(header.argument >> 32), lowHalf(header.argument)};
  }
  [[nodiscard]] constexpr std::uint64_t packed() const {
    return packHalves(std::uint32_t{server} << 16 | members, number);
  }
};

} // namespace hvd_order
