#pragma once

#include <algorithm>

#include "base/types.h"

namespace hvd_order {

/// Largest number of children of a rank in the tree along which the ranks agree. A thousand ranks
/// are then at most five levels below rank 0, and no rank sends a decision more than four times.
constexpr int kFanOut = 4;

/// A rank's place in a tree with rank 0 at its root. Ranks are numbered level by level, so the
/// children of a rank are consecutive, and neighbours in the tree are often on one host.
struct TreePlace {
  Rank parent;     ///< -1 for rank 0
  Rank firstChild; ///< the children are firstChild ... firstChild + children - 1
  int children;

  [[nodiscard]] bool isChild(Rank rank) const {
    return rank >= firstChild && rank < firstChild + children;
  }
};

inline TreePlace placeInTree(Rank rank, int size, int fanOut = kFanOut) {
  // In 64 bits: rank * fanOut may exceed an int for a fan-out as large as the job.
  const std::int64_t first = std::int64_t{rank} * fanOut + 1;
  const std::int64_t end = std::min<std::int64_t>(first + fanOut, size);
  return {
      rank == 0 ? -1 : (rank - 1) / fanOut, static_cast<Rank>(std::min<std::int64_t>(first, size)),
      static_cast<int>(std::max<std::int64_t>(0, end - first))};
}

} // namespace hvd_order
