#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// A state as numbers: two objects with equal words make the same decisions from then on. For
/// programs that compare states (tests/model_checker).
using StateWords = std::vector<std::uint64_t>;

/// Appends the slices, and their number, so that neighbouring lists cannot be confused.
template <typename Slices>
void appendSlices(StateWords& words, const Slices& slices) {
  words.push_back(slices.size());
  for (const SliceKey slice : slices) {
    words.push_back(slice.word());
  }
}

} // namespace hvd_order
