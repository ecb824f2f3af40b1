#include "scheduler/planned.h"

#include "base/error.h"

namespace hvd_order {

const std::vector<SliceKey>& Planned::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  for (const SliceKey slice : ready) {
    scheduler_.offer(slice);
  }
  return ready;
}

void Planned::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(
      false, "rank ", from, " sent ", slices.size(),
      " slices, but the order is planned; all ranks "
      "must use the same agreement");
}

void Planned::decide(Decisions& out) {
  while (const std::optional<SliceKey> slice = scheduler_.next()) {
    out.issue.push_back(*slice);
  }
}

} // namespace hvd_order
