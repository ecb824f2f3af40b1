#include "scheduler/agreement.h"

#include "base/error.h"
#include "scheduler/follower.h"
#include "scheduler/leader.h"
#include "scheduler/planned.h"

namespace hvd_order {

std::unique_ptr<Agreement> Agreement::create(
    AgreementKind kind,
    Rank rank,
    int size,
    Policy policy,
    ByteCount creditBytes,
    int fanOut,
    HearingLimits hearing) {
  if (rank < 0 || rank >= size) {
    throw InvalidUsage(concat("rank ", rank, " of ", size));
  }
  if (fanOut < 1) {
    throw InvalidUsage(concat("a rank with ", fanOut, " children"));
  }
  if ((kind == AgreementKind::kPlanned) != (policy == Policy::kPlanned)) {
    throw InvalidUsage("planned agreement and planned policy go together");
  }
  switch (kind) {
    case AgreementKind::kPlanned:
      return std::make_unique<Planned>(creditBytes);
    case AgreementKind::kLeader:
    case AgreementKind::kNegotiated: {
      const bool reports = kind == AgreementKind::kNegotiated;
      if (rank == 0) {
        return std::make_unique<Leader>(size, fanOut, policy, creditBytes, reports);
      }
      return std::make_unique<Follower>(rank, size, fanOut, policy, creditBytes, reports, hearing);
    }
  }
  throw BrokenInvariant("unknown agreement kind");
}

void Agreement::addModel(
    ModelId model,
    std::shared_ptr<const SliceLayout> layout,
    std::vector<SliceIndex> plan) {
  scheduler_.addModel(model, std::move(layout), std::move(plan));
}

const std::vector<SliceKey>& Agreement::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  for (const SliceKey slice : ready) {
    sliceReady(slice);
  }
  return ready;
}

const std::vector<TensorKey>& Agreement::sliceDone(SliceKey slice) {
  const std::vector<TensorKey>& complete = scheduler_.sliceDone(slice);
  for (const SliceKey next : scheduler_.becameReady()) {
    sliceReady(next);
  }
  return complete;
}

void Agreement::succeed(Agreement&& planned, Policy policy) {
  scheduler_ = std::move(planned.scheduler_);
  scheduler_.leavePlan(policy);
  for (const ModelId model : scheduler_.models()) {
    const std::size_t slices = scheduler_.layout(model).slices().size();
    for (SliceIndex slice = 0; slice < slices; ++slice) {
      if (scheduler_.isReady({model, slice})) {
        sliceReady({model, slice});
      }
    }
  }
}

void Agreement::checkExist(Rank from, std::span<const SliceKey> slices) const {
  for (const SliceKey slice : slices) {
    if (!scheduler_.hasModel(slice.model)) {
      continue; // this rank has yet to register it
    }
    const std::size_t count = scheduler_.layout(slice.model).slices().size();
    if (slice.index >= count) {
      throw MalformedMessage(concat(
          "rank ", from, " sent a malformed control message: it names slice ", slice.index,
          " of model ", slice.model, ", which has ", count,
          ". All ranks must run the same version of hvd_order and train the same models"));
    }
  }
}

void Agreement::removeModel(ModelId model) {
  scheduler_.removeModel(model);
}

} // namespace hvd_order
