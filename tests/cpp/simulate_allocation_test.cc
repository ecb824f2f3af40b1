#include "check.h"
#include "count_allocations.h"
#include "planning/simulator.h"
#include "simulated_chain.h"

namespace hvd_order::simulate {

namespace {

Workload chainOf(int layers) {
  std::vector<Layer> all;
  for (int i = 0; i < layers; ++i) {
    all.push_back({1, 2, (1 + i % 7) * kUnit, 0.1 * (i % 3)});
  }
  return chain(all);
}

long allocationsOf(const Workload& workload, Scenario scenario, std::uint32_t steps) {
  scenario.steps = steps;
  const long before = test::allocations;
  CHECK_EQUAL(simulate(workload, scenario).stepS.size(), steps);
  return test::allocations - before;
}

// What is allocated is allocated at the start and in the first steps.
void checkStepsDoNotAllocate(const Scenario& scenario) {
  const Workload workload = chainOf(50);
  const long few = allocationsOf(workload, scenario, 20);
  CHECK(few > 0); // the counter is at work
  CHECK_EQUAL(allocationsOf(workload, scenario, 200), few);
}

Scenario smallScenario() {
  Scenario s;
  s.sliceBytes = 2 * kUnit;
  s.creditBytes = 8 * kUnit;
  s.network = AllReduceCost{.latencyS = 0.1, .secondsPerByte = 1.0 / kUnit, .lanes = 2};
  s.recorded = 0;
  return s;
}

} // namespace

TEST(plannedStepsDoNotAllocate) {
  Scenario s = smallScenario();
  s.slowness = {1, 1, 1.1};
  s.agreement = AgreementKind::kPlanned;
  s.policy = Policy::kPlanned;
  const Workload workload = chainOf(50);
  for (SliceIndex i = static_cast<SliceIndex>(layoutOf(workload, s.sliceBytes)->slices().size());
       i-- > 0;) {
    s.plan.push_back(i);
  }
  checkStepsDoNotAllocate(s);
  s.order = ComputeOrder::kReady;
  checkStepsDoNotAllocate(s);
  s.crossIteration = false;
  checkStepsDoNotAllocate(s);
}

// Agreements of several ranks put each message into a vector of its own.
TEST(aLeaderAloneDoesNotAllocate) {
  checkStepsDoNotAllocate(smallScenario());
}

TEST(splitStepsDoNotAllocate) {
  Scenario s = smallScenario();
  s.creditBytes = 16 * kUnit; // the squares are one slice
  s.clipped = true;
  checkStepsDoNotAllocate(s);
  s.split = true;
  checkStepsDoNotAllocate(s);
  s.crossIteration = false;
  checkStepsDoNotAllocate(s);
}

TEST(serversDoNotAllocate) {
  Scenario s = smallScenario();
  s.slowness = {1, 1.2, 1};
  for (const PullTiming pull : {PullTiming::kAtOnce, PullTiming::kNextStep}) {
    s.network = ServerNetwork{
        .servers = 3,
        .latencyS = 0.1,
        .workerBytesPerS = kUnit,
        .serverBytesPerS = kUnit,
        .pull = pull,
        .pullCreditBytes = 8 * kUnit};
    checkStepsDoNotAllocate(s);
  }
}

} // namespace hvd_order::simulate
