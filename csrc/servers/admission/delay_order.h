#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd_order {

/// An update that waits to be sent to a server.
struct WaitingUpdate {
  std::int64_t slack; ///< updates that may still be applied before it
  double seconds;     ///< duration of the transfer, if the update is sent next
};

/// A sending order, as indices into a set of updates.
struct DelayOrder {
  std::vector<std::size_t> order; ///< updates in the order in which to send and apply them
  std::vector<std::size_t> late;  ///< updates that cannot be applied in time; ascending
};

/// Orders updates shortest first, as far as every update can still be applied within its slack.
///
/// An update with slack s may take one of the next s + 1 turns: updates are jobs of unit length
/// with deadlines. Where k updates have slack less than k, these updates need the next k turns, so
/// the shortest of them goes first; otherwise the shortest of all updates goes first. The
/// remaining updates can then always be applied in time. If not all updates fit, the fewest
/// possible are late. Among the updates that could be left out, the longest one is late, and among
/// equally long ones the last.
///
/// Source: Viswanathan, Balasubramanian, Akella, "MLfabric: A parallel network fabric for faster
/// distributed machine learning" (arXiv 1907.00434), whose text was not at hand: reconstructed
/// from its summary. The deadline check: Jackson 1955 (deadlines can be met if they can be met in
/// the order of deadlines). The choice of late updates: Moore 1968 with Hodgson's rule; sets of
/// unit jobs that fit are a matroid.
DelayOrder delayBoundedOrder(std::span<const WaitingUpdate> updates);

/// Updates that may be sent next by the rule of `delayBoundedOrder`, and the late ones.
struct NextUpdates {
  std::vector<std::size_t> candidates; ///< the shortest of them should be sent
  std::vector<std::size_t> late;       ///< ascending
};
NextUpdates nextUpdates(std::span<const WaitingUpdate> updates);

} // namespace hvd_order
