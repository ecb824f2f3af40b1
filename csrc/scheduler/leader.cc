#include "scheduler/leader.h"

#include "base/error.h"

// Rank 0 decides, and the counts of its subtree say when it may.
//
// A slice whose round is complete (subtree.h) is offered to the scheduler, which orders candidates
// by policy and credit. An all-gather is ready once its reduce-scatter is done on this rank; on a
// rank that is not heard it waits there for the end of the same reduce-scatter, which is in flight.
//
// Invariant: each round of a slice is offered exactly once, and decided after that.
//
// Sources: priority order from P3 (Jayarajan et al., MLSys 2019), credit from Peng et al.,
// SOSP 2019; docs/decisions/order-agreement.md compares the agreements.

namespace hvd_order {

Leader::Leader(int size, int fanOut, Policy policy, ByteCount creditBytes, bool hearsAll)
    : Agreement(policy, creditBytes), subtree_(0, size, fanOut, hearsAll, true) {}

void Leader::sliceReady(SliceKey slice) {
  subtree_.ready(slice, complete_);
  offerComplete();
}

void Leader::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(
      subtree_.place().isChild(from), "rank ", from,
      " reported to rank 0, but is not its child in the tree");
  if (subtree_.hears(from)) { // else they may be of a layout that is gone
    checkExist(from, slices);
  }
  subtree_.received(from, slices, complete_);
  offerComplete();
}

void Leader::offerComplete() {
  for (const SliceKey slice : complete_) {
    scheduler_.offer(slice);
  }
  complete_.clear();
}

bool Leader::mayDecide() const {
  // A message costs about as much as a small slice. The window is therefore refilled only when
  // half of it has drained: messages are fewer and longer, and the other half keeps the link busy.
  return subtree_.place().children == 0 || subtree_.hasMessages() ||
      scheduler_.inFlightBytes() <= scheduler_.creditBytes() / 2;
}

void Leader::decide(Decisions& out) {
  subtree_.takeMessages(out.messages);
  if (!mayDecide()) {
    return;
  }
  const auto first = static_cast<std::ptrdiff_t>(out.issue.size());
  while (const std::optional<SliceKey> slice = scheduler_.next()) {
    out.issue.push_back(*slice);
  }
  if (static_cast<std::ptrdiff_t>(out.issue.size()) > first) {
    subtree_.decided({out.issue.begin() + first, out.issue.end()});
    subtree_.takeMessages(out.messages);
  }
}

void Leader::appendState(StateWords& words) const {
  Agreement::appendState(words);
  subtree_.appendState(words);
}

} // namespace hvd_order
