#include "scheduler/follower.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

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
    // From the back: what is needed first has mostly become ready last.
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
  return !alwaysReports_ && !asked_ && (reports_ ? passes_ >= kPassesHeard : holdUps_ >= kHoldUps);
}

/// Whether what is decided does not come, while nothing travels and something else could.
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

} // namespace hvd_order
