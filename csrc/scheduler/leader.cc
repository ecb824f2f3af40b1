#include "scheduler/leader.h"

#include "base/error.h"

namespace hvd_order {

const std::vector<SliceKey>& Leader::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  for (const SliceKey slice : ready) {
    scheduler_.offer(slice);
  }
  return ready;
}

void Leader::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(false, "rank ", from, " sent ", slices.size(), " slices to the leader");
}

bool Leader::mayDecide() const {
  // A message to every rank costs about as much as sending a small slice, so the window is filled
  // up only when half of it has drained: fewer, longer messages, while the other half keeps the
  // link busy.
  return size_ == 1 || scheduler_.inFlightBytes() <= scheduler_.creditBytes() / 2;
}

void Leader::decide(Decisions& out) {
  if (!mayDecide()) {
    return;
  }
  const std::size_t first = out.issue.size();
  while (const std::optional<SliceKey> slice = scheduler_.next()) {
    out.issue.push_back(*slice);
  }
  if (out.issue.size() == first) {
    return;
  }
  for (Rank rank = 1; rank < size_; ++rank) {
    out.messages.push_back(
        {rank, {out.issue.begin() + static_cast<std::ptrdiff_t>(first), out.issue.end()}});
  }
}

const std::vector<SliceKey>& Follower::tensorReady(TensorKey tensor) {
  return scheduler_.tensorReady(tensor);
}

void Follower::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(from == 0, "rank ", from, " sent an order; only rank 0 decides");
  decided_.insert(decided_.end(), slices.begin(), slices.end());
}

void Follower::decide(Decisions& out) {
  while (!decided_.empty() && scheduler_.take(decided_.front())) {
    out.issue.push_back(decided_.front());
    decided_.pop_front();
  }
}

bool Follower::mayDecide() const {
  return !decided_.empty();
}

std::optional<SliceKey> Follower::head() const {
  return decided_.empty() ? std::nullopt : std::optional(decided_.front());
}

} // namespace hvd_order
