#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd_order {

/// An update that waits to be sent to a server.
struct WaitingUpdate {
  std::int64_t slack; ///< updates that may still be applied before it
  double seconds;     ///< that it takes, if sent next
};

/// Indices of a set of updates.
struct DelayOrder {
  std::vector<std::size_t> order; ///< in which they should be sent and applied
  std::vector<std::size_t> late;  ///< cannot be applied in time; ascending
};

/// Shortest first, as far as every update can still be applied within its slack.
///
/// An update with slack s may take one of the next s + 1 turns: jobs of unit length with deadlines.
/// Where k updates have slack less than k, they need the next k turns for themselves, so the
/// shortest of them goes first, and of all otherwise. What is left can then always be applied in
/// time. If not all fit, the fewest are late, and of those that one could leave out, the longest,
/// and the last of these.
///
/// Source: Viswanathan, Balasubramanian, Akella, "MLfabric: A parallel network fabric for faster
/// distributed machine learning" (arXiv 1907.00434), whose text was not at hand: reconstructed from
/// its summary. The guard: Jackson 1955 (deadlines can be met if they can in their own order).
/// Who is late: Moore 1968 with Hodgson's rule; sets of unit jobs that fit are a matroid.
DelayOrder delayBoundedOrder(std::span<const WaitingUpdate> updates);

/// Those that may be sent next by that rule, and those that are late.
struct NextUpdates {
  std::vector<std::size_t> candidates; ///< the shortest of them should go
  std::vector<std::size_t> late;       ///< ascending
};
NextUpdates nextUpdates(std::span<const WaitingUpdate> updates);

} // namespace hvd_order
