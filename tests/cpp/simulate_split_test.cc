#include <vector>

#include "base/error.h"
#include "check.h"
#include "planning/simulator.h"
#include "simulated_chain.h"

// Steps whose gradients are clipped by the norm of all of them, with whole and with split
// all-reduces. Either half of an all-reduce of `kUnit` bytes takes half a second.

namespace hvd_order::simulate {

namespace {

/// A rank alone, with one slice in flight: nothing shares the link, and no message is waited for.
Scenario clippedScenario(ByteCount sliceBytes, bool split) {
  Scenario s = scenario(sliceBytes, sliceBytes);
  s.slowness = {1.0};
  s.clipped = true;
  s.split = split;
  s.network.lanes = 1; // nothing travels beside the squares
  s.steps = 4;
  return s;
}

const SliceRecord& sliceOf(const Result& result, const SliceLayout& layout, int step, int slice) {
  const auto row = static_cast<std::size_t>(step) * layout.slices().size();
  return result.slices[row + static_cast<std::size_t>(slice)];
}

} // namespace

TEST(eitherHalfOfARingIsHalfOfItsMessages) {
  const AllReduceCost half = halfOf(ringAllReduce(8, 0.25, kUnit));
  CHECK_NEAR(half.latencyS, 7 * 0.25);
  CHECK_NEAR(half.secondsPerByte, 7.0 / 8 / kUnit);
  CHECK_NEAR(half.sentPerByte, 7.0 / 8);
  CHECK_NEAR(halfOf({.sliceCostS = 0.5, .lanes = 2}).sliceCostS, 0.5);
  CHECK_EQUAL(halfOf({.sliceCostS = 0.5, .lanes = 2}).lanes, 2U);
}

TEST(wholeAllReducesOfAClippedStepAreAllAwaited) {
  const Workload workload = chain(unevenLayers(9));
  for (const bool crossIteration : {true, false}) {
    Scenario s = clippedScenario(kUnit, false);
    s.crossIteration = crossIteration;
    Scenario awaited = s;
    awaited.clipped = false;
    awaited.crossIteration = false;
    CHECK(sameTimes(simulate(workload, s), simulate(workload, awaited)));
  }
}

// Two layers, forward 1 s, backward 2 s each, gradients of 4 units in one slice each.
//   first step: forward 0-2, backward l1 2-4, l0 4-6.
//   reduce-scatters: l1 4-6, l0 6-8. The squares are two float64 in 16 bytes: 8-8.25.
//   all-gathers: l0 8.25-10.25, l1 10.25-12.25.
//   second step: forward l0 10.25-11.25, l1 12.25-13.25, backward until 17.25.
// Whole: l1 4-8, l0 8-12, forward 12-14, backward until 18.
TEST(aSplitChainOfTwoByHand) {
  const Workload workload = chain({{1, 2, 4 * kUnit}, {1, 2, 4 * kUnit}});
  Scenario s = clippedScenario(4 * kUnit, true);
  s.steps = 2;
  const Result result = simulate(workload, s);
  const auto layout = layoutOf(workload, s.sliceBytes, s.split);
  CHECK_EQUAL(layout->slices().size(), 5U);
  CHECK_NEAR(result.stepS[0], 6);
  CHECK_NEAR(result.stepS[1], 17.25 - 6);
  const std::vector<std::vector<double>> readyAndTravel = {
      {8, 8, 8.25}, {6, 6, 8}, {4, 4, 6}, {8, 8.25, 10.25}, {6, 10.25, 12.25}};
  for (int slice = 0; slice < 5; ++slice) {
    const SliceRecord& times = sliceOf(result, *layout, 0, slice);
    const std::vector<double>& expected = readyAndTravel[static_cast<std::size_t>(slice)];
    CHECK_NEAR(times.readyS, expected[0]);
    CHECK_NEAR(times.startedS, expected[1]);
    CHECK_NEAR(times.finishedS, expected[2]);
  }
  CHECK_NEAR(opOf(result, workload, 1, 0).startS, 10.25);
  CHECK_NEAR(opOf(result, workload, 1, 1).startS, 12.25);
  CHECK_NEAR(result.sentBytes, 2 * (8 * kUnit + 16.0));
  s.split = false;
  CHECK_NEAR(simulate(workload, s).stepS[1], 12);
}

// The same with backward l0 5 s, and an update of l1 of half a second.
//   reduce-scatter and all-gather of l1 4-6 and 6-8; reduce-scatter l0 9-11, squares 11-11.25.
//   l1 is updated when the norm is known, 11.25-11.75; all-gather l0 11.25-13.25, forward 13.25.
TEST(gathersFillTheIdleLinkBeforeTheNorm) {
  const Workload workload = chain({{1, 5, 4 * kUnit}, {1, 2, 4 * kUnit, 0.5}});
  Scenario s = clippedScenario(4 * kUnit, true);
  s.steps = 2;
  const Result result = simulate(workload, s);
  const auto layout = layoutOf(workload, s.sliceBytes, s.split);
  CHECK_NEAR(sliceOf(result, *layout, 0, 4).startedS, 6);
  CHECK_NEAR(sliceOf(result, *layout, 0, 0).finishedS, 11.25);
  CHECK_EQUAL(result.devices[0].updates.size(), 1U);
  CHECK_NEAR(result.devices[0].updates[0].startS, 11.25);
  CHECK_NEAR(opOf(result, workload, 1, 0).startS, 13.25);
  CHECK_NEAR(result.stepS[1], 22.25 - 9);
}

// In slices of a unit, l0 of one and l1 of four; backward l0 2.75 s. The squares take 48 bytes.
//   reduce-scatters of l1 4-6, two of its all-gathers 6-7; l0 is ready at 6.75 and goes next.
//   reduce-scatter l0 7-7.5, squares 7.5-8.25, all-gather l0 8.25-8.75, the rest of l1 8.75-9.75.
TEST(reduceScattersGoBeforeGathers) {
  const Workload workload = chain({{1, 2.75, kUnit}, {1, 2, 4 * kUnit}});
  Scenario s = clippedScenario(kUnit, true);
  s.steps = 2;
  const Result result = simulate(workload, s);
  const auto layout = layoutOf(workload, s.sliceBytes, s.split);
  CHECK_EQUAL(layout->slices().size(), 11U);
  CHECK_NEAR(sliceOf(result, *layout, 0, 8).finishedS, 7);
  CHECK_NEAR(sliceOf(result, *layout, 0, 1).startedS, 7);
  CHECK_NEAR(sliceOf(result, *layout, 0, 0).finishedS, 8.25);
  CHECK_NEAR(sliceOf(result, *layout, 0, 9).startedS, 8.75);
  CHECK_NEAR(opOf(result, workload, 1, 0).startS, 8.75);
  CHECK_NEAR(opOf(result, workload, 1, 1).endS, 10.75);
}

// One layer of 4 units in one slice, ready at 2. Latency 10 s of an all-reduce, 5 s of a half.
//   reduce-scatter 7-9.5, all-gather from 9.5 + 5, 14.5-17, squares from 9.5 + 10, 19.5-20.25.
TEST(eachHalfHasItsLatencyAndTheCostOfASlice) {
  const Workload workload = chain({{1, 1, 4 * kUnit}});
  Scenario s = clippedScenario(4 * kUnit, true);
  s.creditBytes = 8 * kUnit;
  s.network = AllReduceCost{.latencyS = 10, .sliceCostS = 0.5, .secondsPerByte = 1.0 / kUnit};
  s.steps = 1;
  s.recorded = 1;
  const Result result = simulate(workload, s);
  CHECK_NEAR(result.slices[1].startedS, 7);
  CHECK_NEAR(result.slices[1].finishedS, 9.5);
  CHECK_NEAR(result.slices[2].startedS, 14.5);
  CHECK_NEAR(result.slices[2].finishedS, 17);
  CHECK_NEAR(result.slices[0].startedS, 19.5);
  CHECK_NEAR(result.endS, 20.25);
}

TEST(aGatherThatComesBeforeTheNormIsHeld) {
  // As above: the gradient has arrived at 17, but the next step waits for the norm.
  for (const double updateS : {0.0, 3.0}) {
    const Workload updated = chain({{1, 1, 4 * kUnit, updateS}});
    Scenario s = clippedScenario(4 * kUnit, true);
    s.creditBytes = 8 * kUnit;
    s.network = AllReduceCost{.latencyS = 10, .sliceCostS = 0.5, .secondsPerByte = 1.0 / kUnit};
    CHECK_NEAR(simulate(updated, s).stepS[1], 18.25 + updateS + 2);
    s.crossIteration = false; // then the step ends after the update
    CHECK_NEAR(simulate(updated, s).stepS[0], 20.25 + updateS);
    CHECK_NEAR(simulate(updated, s).stepS[1], 20.25 + updateS);
  }
}

TEST(aPlanOfHalvesIsFollowed) {
  const Workload workload = chain({{1, 2, 4 * kUnit}, {1, 2, 4 * kUnit}});
  Scenario s = clippedScenario(4 * kUnit, true);
  s.slowness = {1, 1};
  s.agreement = AgreementKind::kPlanned;
  s.policy = Policy::kPlanned;
  s.plan = {2, 1, 0, 3, 4};
  CHECK_NEAR(simulate(workload, s).stepS[1], 17.25 - 6);
  s.plan = {2, 1, 0, 4, 3}; // both forwards wait for the last gather, until 12.25
  CHECK_NEAR(simulate(workload, s).stepS[1], 18.25 - 6);
  s.plan = {2, 4, 1, 3, 0}; // all gathers go before the norm
  CHECK_NEAR(simulate(workload, s).stepS[1], 18.25 - 6);
  s.plan = {4, 2, 1, 0, 3};
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, simulate(workload, s)),
      "sends 'parts of l1' before 'sum of l1', for which it waits");
  s.plan = {0, 1, 2, 3, 4};
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, simulate(workload, s)), "sends 'squares' before 'sum of l0'");
}

TEST(whatCannotBeClippedOrSplitIsSaid) {
  const Workload workload = chain({{1, 2, kUnit}});
  Scenario s = clippedScenario(kUnit, true);
  s.clipped = false;
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, simulate(workload, s)), "simulate it with clipping");
  // Without a gradient there is no norm.
  const Workload alone({{.name = "a", .seconds = 2}}, {});
  CHECK_NEAR(simulate(alone, clippedScenario(kUnit, true)).stepS[1], 2);
}

} // namespace hvd_order::simulate
