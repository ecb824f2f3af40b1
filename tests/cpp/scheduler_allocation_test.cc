#include <algorithm>
#include <numeric>

#include "check.h"
#include "count_allocations.h"
#include "scheduler/scheduler.h"

namespace hvd_order {

namespace {

constexpr ByteCount kUnit = 64;

// Tensors of one slice, of several and shared ones.
std::shared_ptr<const SliceLayout> mixedLayout(bool split) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 200; ++i) {
    const ByteCount size = i % 3 == 0 ? 16 : i % 3 == 1 ? kUnit : 5 * kUnit;
    tensors.push_back({"t" + std::to_string(i), size, static_cast<BufferId>(i % 2)});
  }
  return std::make_shared<SliceLayout>(std::move(tensors), kUnit, true, split);
}

// Slices in order of number; of a split layout, the squares when all sums are done.
std::vector<SliceIndex> planOf(const SliceLayout& layout) {
  std::vector<SliceIndex> plan(layout.slices().size());
  std::iota(plan.begin(), plan.end(), 0);
  if (layout.isSplit()) {
    std::rotate(plan.begin(), plan.begin() + 1, plan.begin() + 1 + layout.pairs());
  }
  return plan;
}

void step(Scheduler& scheduler, std::size_t tensors, std::vector<SliceKey>& link) {
  std::size_t done = 0;
  link.clear();
  const auto pump = [&] {
    while (const auto slice = scheduler.next()) {
      link.push_back(*slice);
    }
  };
  for (std::size_t i = tensors; i > 0; --i) { // as in backward: last first
    for (const SliceKey slice : scheduler.tensorReady({0, static_cast<TensorId>(i - 1)})) {
      scheduler.offer(slice);
    }
    pump();
  }
  while (done < link.size()) {
    scheduler.sliceDone(link[done++]);
    for (const SliceKey slice : scheduler.becameReady()) {
      scheduler.offer(slice);
    }
    pump();
  }
}

void noAllocation(Policy policy, bool split) {
  const auto layout = mixedLayout(split);
  Scheduler scheduler(policy, 4 * kUnit);
  scheduler.addModel(
      0, layout, policy == Policy::kPlanned ? planOf(*layout) : std::vector<SliceIndex>{});
  std::vector<SliceKey> link;
  link.reserve(layout->slices().size());
  step(scheduler, layout->tensors().size(), link);
  CHECK_EQUAL(link.size(), layout->slices().size());
  const long before = test::allocations;
  CHECK(before > 0); // the counter is at work
  for (int i = 0; i < 10; ++i) {
    step(scheduler, layout->tensors().size(), link);
  }
  CHECK_EQUAL(test::allocations - before, 0);
}

} // namespace

TEST(prioritySchedulingDoesNotAllocate) {
  noAllocation(Policy::kPriority, false);
  noAllocation(Policy::kPriority, true);
}

TEST(arrivalSchedulingDoesNotAllocate) {
  noAllocation(Policy::kArrival, false);
  noAllocation(Policy::kArrival, true);
}

TEST(plannedSchedulingDoesNotAllocate) {
  noAllocation(Policy::kPlanned, false);
  noAllocation(Policy::kPlanned, true);
}

} // namespace hvd_order
