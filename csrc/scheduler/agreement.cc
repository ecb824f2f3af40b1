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
    int fanOut) {
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
      return std::make_unique<Follower>(rank, size, fanOut, policy, creditBytes, reports);
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

std::unique_ptr<Agreement>
Agreement::succeed(Planned&& planned, AgreementKind kind, Rank rank, int size, Policy policy) {
  HVDO_CHECK(kind != AgreementKind::kPlanned, "a planned agreement cannot succeed another");
  auto next = create(kind, rank, size, policy, planned.scheduler().creditBytes());
  next->takeOver(std::move(planned.scheduler_), policy);
  return next;
}

void Agreement::takeOver(Scheduler&& scheduler, Policy policy) {
  scheduler_ = std::move(scheduler);
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

void Agreement::removeModel(ModelId model) {
  scheduler_.removeModel(model);
}

} // namespace hvd_order
