#include "servers/admission/delay_order.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

// Scheduling of unit jobs with deadlines. An update with slack s must take one of the next s + 1
// turns; every turn applies one update, however long its transfer takes.
//
// `mostInTime` finds the updates that can be in time (Moore 1968 with Hodgson's rule): take
// updates in the order of deadlines, and whenever more are taken than turns remain, drop the
// longest. Sets of unit jobs that fit are a matroid, so this greedy rule yields the largest set,
// and of the largest sets the shortest.
//
// `urgent` finds how far the order by deadlines leaves a choice (Jackson 1955): if the first k
// updates by slack have to be within the next k turns, one of these k must go next.
//
// Invariant: after each choice the rest still fits. `delayBoundedOrder` takes the shortest update
// of the first set without spare turns, or of all updates if there is no such set, and repeats.
//
// delay_order.h names the sources.
namespace hvd_order {

namespace {

using Indices = std::vector<std::size_t>;

// The largest set of updates that can all be in time, ordered by slack. Among the largest sets it
// is the one with the shortest updates, and of equally long updates it keeps those that have
// waited longest.
Indices mostInTime(std::span<const WaitingUpdate> updates) {
  Indices bySlack(updates.size());
  std::iota(bySlack.begin(), bySlack.end(), 0);
  std::stable_sort(bySlack.begin(), bySlack.end(), [&](std::size_t a, std::size_t b) {
    return updates[a].slack < updates[b].slack;
  });
  std::priority_queue<std::pair<double, std::size_t>> taken; // the longest, or last, on top
  for (const std::size_t index : bySlack) {
    taken.emplace(updates[index].seconds, index);
    if (static_cast<std::int64_t>(taken.size()) > updates[index].slack + 1) {
      taken.pop();
    }
  }
  std::vector<bool> isTaken(updates.size());
  for (; !taken.empty(); taken.pop()) {
    isTaken[taken.top().second] = true;
  }
  std::erase_if(bySlack, [&](std::size_t index) { return !isTaken[index]; });
  return bySlack;
}

// Number of updates, by slack, that need all of the next turns; all updates if there is no such
// set.
std::size_t
urgent(std::span<const WaitingUpdate> updates, const Indices& left, std::int64_t turnsTaken) {
  for (std::size_t count = 1; count <= left.size(); ++count) {
    if (updates[left[count - 1]].slack - turnsTaken < static_cast<std::int64_t>(count)) {
      return count;
    }
  }
  return left.size();
}

Indices without(std::size_t count, Indices kept) {
  std::sort(kept.begin(), kept.end());
  Indices all(count);
  std::iota(all.begin(), all.end(), 0);
  Indices rest;
  std::ranges::set_difference(all, kept, std::back_inserter(rest));
  return rest;
}

} // namespace

DelayOrder delayBoundedOrder(std::span<const WaitingUpdate> updates) {
  Indices left = mostInTime(updates);
  DelayOrder result;
  result.late = without(updates.size(), left);
  const auto key = [&](std::size_t index) {
    return std::tuple(updates[index].seconds, updates[index].slack, index);
  };
  while (!left.empty()) {
    const auto end = left.begin() +
        static_cast<std::ptrdiff_t>(
                         urgent(updates, left, static_cast<std::int64_t>(result.order.size())));
    const auto chosen = std::min_element(
        left.begin(), end, [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
    result.order.push_back(*chosen);
    left.erase(chosen);
  }
  return result;
}

NextUpdates nextUpdates(std::span<const WaitingUpdate> updates) {
  Indices left = mostInTime(updates);
  NextUpdates next;
  next.late = without(updates.size(), left);
  left.resize(urgent(updates, left, 0));
  next.candidates = std::move(left);
  return next;
}

} // namespace hvd_order
