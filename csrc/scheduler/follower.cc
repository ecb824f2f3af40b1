#include "scheduler/follower.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

// Follows rank 0's order, and detects when that order holds this rank up.
//
// `decided_` is a queue of rank 0's decisions. Only its head may be issued, so all ranks issue the
// same sequence; the head waits until its slice is ready here and fits the credit. `undecided_`
// holds the slices that are ready here and that rank 0 has not decided yet.
//
// A hold-up is a head that is not ready here while nothing is in flight and undecided slices could
// be sent. After `holdUps` of them in one backward pass, the follower sends an empty message, which
// asks rank 0 to hear it. A pass ends when slice 0 is ready, since slice 0 is produced last.
//
// Messages carry no sequence numbers. Rank 0 answers in the stream of its decisions, so both sides
// agree which decisions precede the answer. Slices decided before the answer (`decidedUnheard_`)
// are not reported; slices that become ready later, and those in `undecided_`, are reported.
//
// Invariant: while reporting, each slice is reported exactly once for each time it is ready,
// unless rank 0 decided that time before its answer. docs/decisions/order-agreement.md has the
// choice.

namespace hvd_order {

const std::vector<SliceKey>& Follower::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  for (const SliceKey slice : ready) {
    const auto place = std::ranges::find(decided_, slice);
    if (place == decided_.end()) {
      undecided_.push_back(slice);
    }
    const auto before = static_cast<std::size_t>(place - decided_.begin());
    if (reports_ && before >= decidedUnheard_) {
      unreported_.push_back(slice);
    }
    if (slice.index == 0) { // slices are numbered in consumption order
      ++passes_;
      holdUps_ = 0;
      heldUpBy_.reset();
    }
  }
  return ready;
}

void Follower::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(from == 0, "rank ", from, " sent an order; only rank 0 decides");
  if (slices.empty()) {
    answered();
    return;
  }
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
  HVDO_CHECK(asked_, "rank 0 answered a question that was not asked");
  asked_ = false;
  reports_ = !reports_;
  unreported_.clear();
  holdUps_ = 0;
  passes_ = 0;
  if (reports_) {
    decidedUnheard_ = decided_.size();
    unreported_ = undecided_;
  }
}

void Follower::decide(Decisions& out) {
  while (!decided_.empty() && scheduler_.take(decided_.front())) {
    out.issue.push_back(decided_.front());
    decided_.pop_front();
    decidedUnheard_ -= decidedUnheard_ > 0 ? 1 : 0;
  }
  if (!unreported_.empty()) {
    out.messages.push_back({0, unreported_});
    unreported_.clear();
  }
  if (holdsUp() && heldUpBy_ != decided_.front()) {
    heldUpBy_ = decided_.front();
    ++holdUps_;
  }
  if (wantsChange()) {
    asked_ = true;
    out.messages.push_back({0, {}});
  }
}

bool Follower::wantsChange() const {
  return !alwaysReports_ && !asked_ &&
      (reports_ ? passes_ >= hearing_.passesHeard : holdUps_ >= hearing_.holdUps);
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
  return !decided_.empty() || reports_;
}

std::optional<SliceKey> Follower::head() const {
  return decided_.empty() ? std::nullopt : std::optional(decided_.front());
}

void Follower::appendState(StateWords& words) const {
  Agreement::appendState(words);
  appendSlices(words, decided_);
  appendSlices(words, undecided_);
  appendSlices(words, unreported_);
  // The rest has no effect on decisions where it is written as 0.
  const int passes = std::min(passes_, hearing_.passesHeard);
  const int holdUps = std::min(holdUps_, hearing_.holdUps);
  words.insert(
      words.end(),
      {reports_, asked_, reports_ ? decidedUnheard_ : 0,
       static_cast<std::uint64_t>(reports_ && !alwaysReports_ ? passes : 0),
       static_cast<std::uint64_t>(reports_ ? 0 : holdUps),
       heldUpBy_ && !alwaysReports_ ? 1 + std::uint64_t{heldUpBy_->word()} : 0});
}

} // namespace hvd_order
