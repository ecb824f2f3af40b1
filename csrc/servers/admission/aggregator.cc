#include "servers/admission/aggregator.h"

#include <iterator>
#include <utility>
#include <vector>

#include "base/element_sum.h"
#include "servers/wire/arguments.h"

// The helper's side of aggregation (MLfabric's idea; docs/guides/parameter-server.md describes it).
//
// The owner admits several workers at once and names this server as their helper. Each worker
// pushes its gradient here, with the owner, the number of members and the group's number in the
// header. When all parts are there, they are added in rank order and sent to the owner as one
// push. The owner replies once, and the reply is passed on to all members, so the owner's link
// carries one update and one answer for all of them.
//
// Invariant: a helper holds no state that may not be lost. Every worker keeps its gradient until
// it has an answer, and the owner admits it again if the helper fails, so groups are dropped when
// their owner is lost or their layout is replaced.
//
// The owner has only one group of a slice open at a time. A part for a later group therefore shows
// that unsent older groups of that slice have been given up; they are removed, and parts that
// still come for them are ignored. A group that has been sent stays until the owner's reply.
namespace hvd_order {

bool Aggregator::Where::hasSlice(const Where& other) const {
  return owner == other.owner && model == other.model && layout == other.layout &&
      slice == other.slice;
}

void Aggregator::add(
    int worker,
    const FrameHeader& header,
    Payload payload,
    const SliceShape& shape) {
  const auto group = GroupArgument::of(header);
  if (payload.sizeBytes != shape.sizeBytes || header.round == 0 || group.members < 2 ||
      group.members > options_.workers || group.server == options_.server) {
    throw FrameError(concat(
        "a push of ", payload.sizeBytes, " bytes for a group of ", group.members, " and server ",
        group.server));
  }
  std::map<int, Part> parts;
  {
    const std::scoped_lock lock(mutex_);
    const Where where{group.server, header.model, header.layout, header.slice, group.number};
    const auto later = groups_.upper_bound(where);
    if (later != groups_.end() && later->first.hasSlice(where)) {
      return; // the owner has given this group up
    }
    Where first = where;
    first.number = 0;
    for (auto older = groups_.lower_bound(first); older != groups_.end() && older->first < where;) {
      older = older->second.isSent ? std::next(older) : groups_.erase(older);
    }
    OpenGroup& open = groups_[where];
    if (open.isSent) {
      return; // a repeated push
    }
    open.parts[worker] = {header.round, std::move(payload)};
    if (open.parts.size() < group.members) {
      return;
    }
    open.isSent = true;
    parts = open.parts;
    for (auto& [rank, part] : open.parts) {
      part.gradient = {};
    }
  }
  std::vector<const std::byte*> inputs;
  std::vector<Member> members;
  for (const auto& [rank, part] : parts) {
    inputs.push_back(part.gradient.data());
    members.push_back({rank, part.round});
  }
  const Payload total = Payload::allocate(shape.sizeBytes);
  sum(shape.type, inputs, total.data(), shape.sizeBytes);
  FrameHeader whole = header;
  whole.round = group.number;
  whole.argument = 0;
  peers_.send(
      {PeerKind::kServer, group.server}, options_.urgencyOf(header.slice), whole,
      withMembers(total, members));
}

void Aggregator::passOn(ServerId owner, const FrameHeader& header, const Payload& payload) {
  std::map<int, Part> parts;
  {
    const std::scoped_lock lock(mutex_);
    const auto found =
        groups_.find({owner, header.model, header.layout, header.slice, header.round});
    if (found == groups_.end()) {
      return; // workers have another layout meanwhile
    }
    parts = std::move(groups_.extract(found).mapped().parts);
  }
  if (payload.sizeBytes == 0) {
    return;
  }
  for (const auto& [rank, part] : parts) {
    FrameHeader answer = header;
    answer.flags = 0;
    answer.round = part.round;
    peers_.send({PeerKind::kWorker, rank}, options_.urgencyOf(header.slice), answer, payload);
  }
}

void Aggregator::ownerGone(ServerId owner) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(groups_, [&](const auto& entry) { return entry.first.owner == owner; });
}

void Aggregator::retire(ModelId model, std::uint32_t layout) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(groups_, [&](const auto& entry) {
    return entry.first.model == model && entry.first.layout == layout;
  });
}

} // namespace hvd_order
