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
