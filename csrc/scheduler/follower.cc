#include "scheduler/follower.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

// Follows rank 0's order, passes it on, and detects when that order holds this rank up.
//
// `decided_` is a queue of rank 0's decisions. Only its head may be issued, so all ranks issue the
// same sequence; the head waits until its slice is ready here and fits the credit. `undecided_`
// holds the slices that are ready here and that rank 0 has not decided yet. Decisions go on to the
// children as soon as they arrive, whether or not this rank can follow them.
//
// A hold-up is a head that is not ready here while nothing is in flight and undecided slices could
// be sent. After `holdUps` of them in one backward pass, the follower sends its parent an empty
// message, which asks to be heard. A pass ends when slice 0 is ready, since slice 0 is produced
// last; in a split layout slice 0, the squares, waits for all reduce-scatters and so is ready last.
//
// In a split layout, slices also become ready by the end of others on this rank. A head that waits
// for such an end is no hold-up: something is in flight.
//
// A rank that hears a child has to be heard itself, or rank 0 would not wait for the child. So
// requests climb the tree, one edge after the other. The answers do not wait for each other: until
// the parent has answered, what the child reports is merged here and has no effect.
//
// Invariant: `unreported_` has the rounds that subtree.h requires to be reported, in the order in
// which they became complete. docs/decisions/order-agreement.md has the choice.

namespace hvd_order {

Follower::Follower(
    Rank rank,
    int size,
    int fanOut,
    Policy policy,
    ByteCount creditBytes,
    bool alwaysReports,
    HearingLimits hearing)
    : Agreement(policy, creditBytes),
      subtree_(rank, size, fanOut, alwaysReports, alwaysReports),
      alwaysReports_(alwaysReports),
      hearing_(hearing) {}

void Follower::sliceReady(SliceKey slice) {
  subtree_.ready(slice, unreported_);
  if (std::ranges::find(decided_, slice) == decided_.end()) {
    undecided_.push_back(slice);
  }
  if (slice.index == 0) { // ready last in a step
    ++passes_;
    holdUps_ = 0;
    heldUpBy_.reset();
  }
}

void Follower::received(Rank from, std::span<const SliceKey> slices) {
  if (subtree_.place().isChild(from)) {
    if (subtree_.hears(from)) { // else they may be of a layout that is gone
      checkExist(from, slices);
    }
    subtree_.received(from, slices, unreported_);
    return;
  }
  HVDO_CHECK(
      from == subtree_.place().parent, "rank ", from, " sent an order; only rank ",
      subtree_.place().parent, " does");
  if (slices.empty()) {
    answered();
  } else {
    checkExist(from, slices);
    decided(slices);
  }
}

void Follower::decided(std::span<const SliceKey> slices) {
  subtree_.decided(slices);
  for (const SliceKey slice : slices) {
    // Search from the back: the slices needed first usually became ready last.
    const auto place = std::find(undecided_.rbegin(), undecided_.rend(), slice);
    if (place != undecided_.rend()) {
      undecided_.erase(std::next(place).base());
    }
    decided_.push_back(slice);
  }
}

void Follower::answered() {
  HVDO_CHECK(asked_, "rank ", subtree_.place().parent, " answered a question that was not asked");
  asked_ = false;
  holdUps_ = 0;
  passes_ = 0;
  unreported_.clear();
  if (subtree_.reports()) {
    subtree_.stopReports();
  } else {
    subtree_.startReports(undecided_, unreported_);
  }
}

void Follower::decide(Decisions& out) {
  subtree_.takeMessages(out.messages);
  while (!decided_.empty() && scheduler_.take(decided_.front())) {
    out.issue.push_back(decided_.front());
    decided_.pop_front();
  }
  const Rank parent = subtree_.place().parent;
  if (!unreported_.empty()) {
    out.messages.push_back({parent, unreported_});
    unreported_.clear();
  }
  if (holdsUp() && heldUpBy_ != decided_.front()) {
    heldUpBy_ = decided_.front();
    ++holdUps_;
  }
  if (wantsChange()) {
    asked_ = true;
    out.messages.push_back({parent, {}});
  }
}

bool Follower::wantsChange() const {
  const bool wantsReports = subtree_.hearsAny() ||
      (subtree_.reports() ? passes_ < hearing_.passesHeard : holdUps_ >= hearing_.holdUps);
  return !alwaysReports_ && !asked_ && subtree_.reports() != wantsReports;
}

/// Whether the next decided slice is not ready, while nothing is in flight and another slice could
/// be sent.
bool Follower::holdsUp() const {
  if (decided_.empty() || undecided_.empty() || scheduler_.inFlightBytes() > 0) {
    return false;
  }
  const SliceKey next = decided_.front();
  return scheduler_.hasModel(next.model) && !scheduler_.isReady(next);
}

bool Follower::mayDecide() const {
  return !decided_.empty() || subtree_.reports() || subtree_.hasMessages() || wantsChange();
}

std::optional<SliceKey> Follower::head() const {
  return decided_.empty() ? std::nullopt : std::optional(decided_.front());
}

void Follower::appendState(StateWords& words) const {
  Agreement::appendState(words);
  subtree_.appendState(words);
  appendSlices(words, decided_);
  appendSlices(words, undecided_);
  appendSlices(words, unreported_);
  // The rest has no effect on decisions where it is written as 0.
  const bool reports = subtree_.reports();
  const int passes = std::min(passes_, hearing_.passesHeard);
  const int holdUps = std::min(holdUps_, hearing_.holdUps);
  words.insert(
      words.end(),
      {asked_, static_cast<std::uint64_t>(reports && !alwaysReports_ ? passes : 0),
       static_cast<std::uint64_t>(reports ? 0 : holdUps),
       heldUpBy_ && !alwaysReports_ ? 1 + std::uint64_t{heldUpBy_->word()} : 0});
}

} // namespace hvd_order
