#include "scheduler/planned.h"

#include "base/error.h"

// The plan replaces the messages: every rank has the same permutation of the slices.
//
// The Scheduler under Policy::kPlanned does the work. A slice is offered when it is ready on this
// rank, and `next` returns only the slice whose turn it is in the plan, if it has been offered and
// fits the credit. After the last slice the plan begins again, so one plan serves all steps.
//
// Invariant: each rank issues a prefix of the endlessly repeated plan, so all ranks issue the same
// sequence without messages. A message is therefore an error. The price is that the order does not
// react to the readiness of the step (docs/decisions/order-agreement.md).

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
