#include "check.h"
#include "count_allocations.h"
#include "planning/simulator.h"

namespace hvd_order::simulate {

namespace {

constexpr ByteCount kUnit = 64;

Workload chain(std::uint32_t layers) {
  std::vector<Op> ops;
  std::vector<Parameter> parameters;
  for (std::uint32_t i = 0; i < layers; ++i) {
    ops.push_back({.name = "forward", .seconds = 1, .reads = {i}});
    parameters.push_back({"w", (1 + i % 7) * kUnit, 0.1 * (i % 3)});
  }
  for (std::uint32_t i = layers; i-- > 0;) {
    ops.push_back({.name = "backward", .seconds = 2, .produces = {i}});
  }
  return {std::move(ops), std::move(parameters)};
}

long allocationsOf(const Workload& workload, Scenario scenario, std::uint32_t steps) {
  scenario.steps = steps;
  const long before = test::allocations;
  CHECK_EQUAL(simulate(workload, scenario).stepS.size(), steps);
  return test::allocations - before;
}

// What is allocated is allocated at the start and in the first steps.
void checkStepsDoNotAllocate(const Scenario& scenario) {
  const Workload workload = chain(50);
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
  const Workload workload = chain(50);
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

} // namespace hvd_order::simulate
