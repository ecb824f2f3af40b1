#include "scheduler/planned.h"

#include <utility>

#include "base/error.h"

// The plan replaces the messages: every rank has the same permutation of the slices.
//
// The Scheduler under Policy::kPlanned does the work. A slice is offered when it is ready on this
// rank, and `next` returns only the slice whose turn it is in the plan, if it has been offered and
// fits the credit. After the last slice the plan begins again, so one plan serves all steps. The
// Scheduler has refused a plan in which a slice of a split layout comes before one that it waits
// for.
//
// Invariant: each rank issues a prefix of the endlessly repeated plan, so all ranks issue the same
// sequence without messages. A message is therefore an error. The price is that the order does not
// react to the readiness of the step (docs/decisions/order-agreement.md).
//
// A second model, which the plan does not cover, ends the plan in the middle of a step. A rank that
// issued slices before others has a longer prefix; the others follow the plan up to the longest
// prefix, because their transfers must match. From there on another agreement decides.

namespace hvd_order {

void Planned::sliceReady(SliceKey slice) {
  scheduler_.offer(slice);
  ++offered_;
}

std::uint64_t Planned::hold() {
  limit_ = issued_;
  return issued_;
}

void Planned::endAt(std::uint64_t issued) {
  HVDO_CHECK(
      issued >= issued_, "the plan was to end after ", issued, " slices, of which ", issued_,
      " have been issued");
  limit_ = issued;
  ending_ = true;
  scheduler_.prepareToLeavePlan();
}

std::uint64_t Planned::takeHoldUps() {
  return std::exchange(holdUps_, 0);
}

void Planned::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(
      false, "rank ", from, " sent ", slices.size(),
      " slices, but the order is planned; all ranks "
      "must use the same agreement");
}

void Planned::decide(Decisions& out) {
  while (issued_ < limit_) {
    const std::optional<SliceKey> slice = scheduler_.next();
    if (!slice) {
      break;
    }
    ++issued_;
    --offered_;
    heldUpBy_.reset(); // in the next step the same slice counts again
    out.issue.push_back(*slice);
  }
  if (offered_ > 0 && scheduler_.inFlightBytes() == 0 && issued_ < limit_ &&
      heldUpBy_ != scheduler_.turn()) {
    heldUpBy_ = scheduler_.turn();
    ++holdUps_;
  }
}

// Hold-ups are told to the owner, and decide nothing here.
void Planned::appendState(StateWords& words) const {
  Agreement::appendState(words);
  words.push_back(ending_ ? 1 : 0);
  words.push_back(limit_ == std::numeric_limits<std::uint64_t>::max() ? 0 : 1 + limit_ - issued_);
}

} // namespace hvd_order
