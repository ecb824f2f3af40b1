#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "servers/wire/payload.h"
#include "servers/wire/registration.h"

namespace hvd_order {

/// A worker's update of one slice.
struct Member {
  int worker;
  Round round;
  friend bool operator==(const Member&, const Member&) = default;
};

/// A group of updates that a helper adds, and the other server concerned; encoded as a header's
/// `argument`.
struct GroupOf {
  ServerId server; ///< the owner, in a frame to the helper; the helper, in a frame to a worker
  std::uint16_t members;
  std::uint32_t number; ///< number of the group, counted by slice at its owner
};
constexpr std::uint64_t argumentOf(const GroupOf& group) {
  return std::uint64_t{group.server} << 48 | std::uint64_t{group.members} << 32 | group.number;
}
constexpr GroupOf groupOf(std::uint64_t argument) {
  return {
      static_cast<ServerId>(argument >> 48), static_cast<std::uint16_t>(argument >> 32),
      static_cast<std::uint32_t>(argument)};
}

/// Bytes that the list of members adds to a sum.
constexpr std::size_t membersBytes(std::size_t members) {
  return members * (sizeof(std::uint32_t) + sizeof(Round));
}
/// The sum of several updates, followed by its members in rank order, as servers send it.
Payload withMembers(const Payload& sum, std::span<const Member> members);
/// Splits such a payload into sum and members. @throws FrameError if it is malformed.
std::pair<Payload, std::vector<Member>>
splitMembers(const Payload& payload, std::size_t sumBytes, int workers);

} // namespace hvd_order
