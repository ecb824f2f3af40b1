#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "planning/simulator.h"
#include "simulated_chain.h"

namespace hvd_order::simulate {

// Two layers, forward 1 s, backward 2 s each, gradients of 3 and 4 units, credit for one slice; by
// priority in test_simulate.py. In order of arrival: l1 travels 4-8, l0 8-11; forward l0 11-12, l1
// 12-13.
TEST(chainOfTwoInOrderOfArrival) {
  const Workload workload = chain({{1, 2, 3 * kUnit}, {1, 2, 4 * kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.steps = 2;
  s.policy = Policy::kArrival;
  CHECK_NEAR(simulate(workload, s).stepS[1], 11); // 6 to 17
  s.crossIteration = false;                       // here everything is awaited at the end, until 11
  const Result result = simulate(workload, s);
  CHECK_NEAR(result.stepS[0], 11);
  CHECK_NEAR(result.stepS[1], 11);
}

// What is in flight cannot be overtaken: with credit for all, l0's slices share the link with l1's.
//   4-6 four slices of l1 share: half a unit of each has gone; at 6 three of l0 join, 7 share.
//   l1's halves end after 3.5 s at 9.5, then l0 has half a unit left each, 3 share: 1.5 s, 11.
TEST(creditLetsSlicesShareTheLink) {
  const Workload workload = chain({{1, 2, 3 * kUnit}, {1, 2, 4 * kUnit}});
  Scenario s = scenario(kUnit, 7 * kUnit);
  s.slowness = {1.0}; // a leader of others refills its window only when half of it is free
  s.steps = 2;
  Result result = simulate(workload, s);
  CHECK_NEAR(result.slices[6].finishedS, 9.5);
  CHECK_NEAR(result.slices[2].finishedS, 11);
  // One lane: in the order of issue, one after the other.
  AllReduceCost cost = plainLink();
  cost.lanes = 1;
  s.network = cost;
  result = simulate(workload, s);
  CHECK_NEAR(result.slices[3].finishedS, 5);
  CHECK_NEAR(result.slices[6].finishedS, 8);
  CHECK_NEAR(result.slices[2].finishedS, 11);
}

TEST(latencyPassesBesideOtherTransfersButNotInOneLane) {
  // One layer of four slices, 1 s each on the link, latency 10 s.
  const Workload workload = chain({{1, 1, 4 * kUnit}});
  AllReduceCost cost = plainLink();
  cost.latencyS = 10;
  Scenario s = scenario(kUnit, 4 * kUnit, cost);
  s.steps = 1;
  CHECK_NEAR(simulate(workload, s).endS, 2 + 10 + 4);
  cost.lanes = 1;
  s.network = cost;
  CHECK_NEAR(simulate(workload, s).endS, 2 + 4 * 11);
  cost.sliceCostS = 0.5;
  s.network = cost;
  CHECK_NEAR(simulate(workload, s).endS, 2 + 4 * 11.5);
}

TEST(updatesRunBeforeReadersAndWhileTheyWait) {
  // l0's gradient comes first in the end, l1's update takes long; credit for one slice.
  // Gradients: l1 ready at 4, 4-5; l0 ready at 6, 6-8.
  // Step 2 from 6: l1 has arrived and is updated 6-9 while l0 is waited for; l0 arrives at 8, its
  // update 9-9.5, forward l0 9.5-10.5, forward l1 10.5-11.5.
  const Workload workload = chain({{1, 2, 2 * kUnit, 0.5}, {1, 2, kUnit, 3}});
  Scenario s = scenario(2 * kUnit, 2 * kUnit);
  s.steps = 2;
  Result result = simulate(workload, s);
  CHECK_NEAR(opOf(result, workload, 1, 0).couldStartS, 6);
  CHECK_NEAR(opOf(result, workload, 1, 0).startS, 9.5);
  CHECK_NEAR(opOf(result, workload, 1, 1).startS, 10.5);
  CHECK_EQUAL(result.devices[0].updates.size(), 2U);
  CHECK_NEAR(result.devices[0].updates[0].startS, 6);
  // Waiting at the end instead: 8, then all updates.
  s.crossIteration = false;
  CHECK_NEAR(simulate(workload, s).stepS[1], 8 + 3.5);
}

// Backward of four layers ends at 6, 8, 10 and 12; the last two gradients of it are small, the
// first two take 3.5 s. In the second step, 13.4375 s later, the second of them would begin at 9.5
// and the last small one have to wait from 12 to 13. Its trigger with a lead of 4 s is the gradient
// of 8.
TEST(largeSlicesAreHeldBackBeforeTheFirstGradient) {
  const Workload workload(
      chain({{1, 2, kUnit}, {1, 2, kUnit}, {1, 2, 8 * kUnit}, {1, 2, 8 * kUnit}}).ops(),
      {{"a", kUnit, 0, 0}, {"b", kUnit, 0, 1}, {"c", 8 * kUnit, 0, 2}, {"d", 8 * kUnit, 0, 3}});
  Scenario s = scenario(8 * kUnit, 8 * kUnit, {.secondsPerByte = 3.5 / (8 * kUnit), .lanes = 1});
  s.steps = 2;
  const std::size_t first = 4; // of the second step's slices
  Result result = simulate(workload, s);
  CHECK_NEAR(result.slices[first].readyS, 13.4375 + 12);
  CHECK_NEAR(result.slices[first].issuedS, 13.4375 + 13);
  s.reservationLeadS = 4;
  result = simulate(workload, s);
  CHECK_NEAR(result.slices[first].issuedS, 13.4375 + 12);
  CHECK_NEAR(result.slices[first + 1].issuedS, 13.4375 + 10); // small ones may go
  CHECK_NEAR(result.slices[first + 2].issuedS, 13.4375 + 12.4375);
  s.network = AllReduceCost{.secondsPerByte = 3.5 / (8 * kUnit)}; // lanes enough for both
  result = simulate(workload, s);
  const double readyS = result.slices[first].readyS;
  CHECK_NEAR(result.slices[first].issuedS, readyS);
  CHECK_NEAR(result.slices[first + 2].issuedS, readyS + 0.4375); // not beside the first
}

// What is held is let go for whoever waits for it.
TEST(aHoldEndsWhenSomebodyWaits) {
  std::vector<Op> ops =
      chain({{1, 2, kUnit}, {1, 2, kUnit}, {1, 2, 8 * kUnit}, {1, 2, 8 * kUnit}}).ops();
  ops[6].awaits = {2}; // backward of the second layer needs the third one's sum
  const Workload workload(
      std::move(ops),
      {{"a", kUnit, 0, 0}, {"b", kUnit, 0, 1}, {"c", 8 * kUnit, 0, 2}, {"d", 8 * kUnit, 0, 3}});
  Scenario s = scenario(8 * kUnit, 8 * kUnit, {.secondsPerByte = 3.5 / (8 * kUnit)});
  for (const double lead : {0.0, 4.0, 8.0}) {
    s.reservationLeadS = lead;
    const Result result = simulate(workload, s); // comes to no standstill
    CHECK_NEAR(result.stepS.back(), 17.4375);
  }
}

TEST(ringAndTreeFollowTheirFormulas) {
  const AllReduceCost ring = ringAllReduce(4, 1e-3, 1e9);
  CHECK_NEAR(ring.latencyS, 6e-3);
  CHECK_NEAR(ring.secondsPerByte, 1.5e-9);
  CHECK_NEAR(ring.sentPerByte, 1.5);
  CHECK_NEAR(treeAllReduce(4, 1e-3, 1e9).latencyS, 4e-3);
  CHECK_NEAR(treeAllReduce(5, 1e-3, 1e9).latencyS, 6e-3);
  CHECK_NEAR(ringAllReduce(1, 1e-3, 1e9).secondsPerByte, 0);
  CHECK_NEAR(treeAllReduce(1, 1e-3, 1e9).latencyS, 0);
  CHECK_THROWS(InvalidUsage, ringAllReduce(0, 1e-3, 1e9));
  CHECK_THROWS(InvalidUsage, treeAllReduce(2, -1, 1e9));
  CHECK_THROWS(InvalidUsage, ringAllReduce(2, 0, 0));
  // 1 MB over a ring of 4: 6 ms and 1.5 ms.
  const Workload workload = chain({{0, 0, 1'000'000}});
  Scenario s = scenario(1 << 20, 1 << 20, ring);
  s.steps = 1;
  CHECK_NEAR(simulate(workload, s).endS, 7.5e-3);
}

TEST(bucketsAreCountedByBuffer) {
  std::vector<Op> ops = {{.name = "all", .seconds = 1, .reads = {0, 1, 2}, .produces = {0, 1, 2}}};
  const Workload workload(std::move(ops), {{"a", 16, 1, 0}, {"b", 32, 2, 1}, {"c", 64, 4, 0}});
  const auto groups = workload.buckets(1000, 1000);
  CHECK_EQUAL(groups, std::vector<std::vector<TensorId>>{{2, 0}, {1}}); // b lies in another buffer
  const Workload merged = workload.merged(groups);
  CHECK_EQUAL(merged.parameters().size(), 2U);
  CHECK_EQUAL(merged.parameters()[0].sizeBytes, 80);
  CHECK_NEAR(merged.parameters()[0].updateSeconds, 5);
  CHECK_EQUAL(merged.parameters()[0].name, "c..a");
  CHECK_EQUAL(merged.parameters()[1].name, "b");
  CHECK_THROWS(InvalidUsage, workload.buckets(0, 1));
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, workload.merged({{0, 1}, {1, 2}})), "and so does another");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, workload.merged({{0, 1}})), "no group holds parameter 'c'");
}

TEST(aGraphRunsItsBranchesSideBySide) {
  //        b (stream 1, 5 s)
  //  a < >  d
  //        c (stream 0, 2 s)
  const Workload workload(
      {{.name = "a", .seconds = 1, .reads = {0}},
       {.name = "b", .seconds = 5, .inputs = {0}, .reads = {1}, .produces = {1}, .stream = 1},
       {.name = "c", .seconds = 2, .inputs = {0}, .produces = {0}},
       {.name = "d", .seconds = 1, .inputs = {1, 2}}},
      {{"x", kUnit}, {"y", kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.steps = 2;
  const Result result = simulate(workload, s);
  CHECK_NEAR(result.stepS[0], 7);
  CHECK_NEAR(opOf(result, workload, 0, 3).startS, 6);
  CHECK_NEAR(result.stepS[1], 7); // both gradients have arrived by then: x at 4, y at 7
  CHECK_NEAR(result.devices[0].busyS[0], 8);
  CHECK_NEAR(result.devices[0].busyS[1], 10);
}

TEST(aDataflowExecutorPassesWhatWaits) {
  // In program order p waits for its slow gradient though q could run.
  const Workload workload(
      {{.name = "p", .seconds = 1, .reads = {0}},
       {.name = "q", .seconds = 4},
       {.name = "r", .seconds = 1, .inputs = {0, 1}, .produces = {0}}},
      {{"x", 4 * kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.steps = 2;
  CHECK_NEAR(simulate(workload, s).stepS[1], 4 + 6);
  s.order = ComputeOrder::kReady;
  CHECK_NEAR(simulate(workload, s).stepS[1], 6);
}

TEST(aGradientIsReadyWhenAllItsProducersAre) {
  const Workload workload( // tied weights
      {{.name = "use", .seconds = 1, .reads = {0}},
       {.name = "one", .seconds = 1, .inputs = {0}, .produces = {0}},
       {.name = "two", .seconds = 1, .inputs = {1}, .produces = {0}}},
      {{"tied", kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.steps = 1;
  CHECK_NEAR(simulate(workload, s).slices[0].readyS, 3);
}

TEST(anOpMayAwaitSumsOfItsOwnStep) {
  // Clipping: needs all sums before the update.
  const Workload workload(
      {{.name = "work", .seconds = 2, .reads = {0}, .produces = {0}},
       {.name = "clip", .seconds = 1, .inputs = {0}, .awaits = {0}}},
      {{"w", 3 * kUnit}});
  const Result result = simulate(workload, scenario(kUnit, kUnit));
  CHECK_NEAR(result.stepS.back(), 2 + 3 + 1);
}

// Seven ranks, one layer, forward 1, backward 1, gradient 1 s: 3 s a step without messages. Two
// children a rank: 1 and 2 below 0, 3 and 4 below 1, 5 and 6 below 2. A message takes 0.25 s.
TEST(messagesGoAlongTheTree) {
  const Workload workload = chain({{1, 1, kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.slowness.assign(7, 1.0);
  s.controlLatencyS = 0.25;
  s.fanOut = 2;
  CHECK_NEAR(simulate(workload, s).stepS.back(), 3.25); // as if all were children of rank 0
  s.everyAgreement = true;
  const Result down = simulate(workload, s);
  CHECK_NEAR(down.stepS.back(), 3.5);
  CHECK_EQUAL(down.devices.size(), 1U);
  CHECK_EQUAL(down.agreement.size(), 7U);
  s.agreement = AgreementKind::kNegotiated;
  CHECK_NEAR(simulate(workload, s).stepS.back(), 4); // two levels up before, two down
  s.agreement = AgreementKind::kLeader;
  s.fanOut = 6;
  CHECK_NEAR(simulate(workload, s).stepS.back(), 3.25);
}

// The same ranks; a message takes its sender 0.1 s. Rank 6 is the last to hear: rank 0 tells 1,
// then 2, which tells 5, then 6. In a star it is the sixth that rank 0 tells.
TEST(aRankSendsOneMessageAfterTheOther) {
  const Workload workload = chain({{1, 1, kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.slowness.assign(7, 1.0);
  s.controlLatencyS = 0.25;
  s.controlSendS = 0.1;
  s.everyAgreement = true;
  s.fanOut = 2;
  CHECK_NEAR(simulate(workload, s).stepS.back(), 3 + 2 * (0.2 + 0.25));
  s.fanOut = 6;
  CHECK_NEAR(simulate(workload, s).stepS.back(), 3 + 0.6 + 0.25);
  s.agreement = AgreementKind::kNegotiated; // reports come at once, each from another sender
  CHECK_NEAR(simulate(workload, s).stepS.back(), 3 + 0.1 + 0.25 + 0.6 + 0.25);
}

TEST(messagesOfEachRankAreCounted) {
  const Workload workload = chain(unevenLayers(10));
  Scenario s = scenario(2 * kUnit, 6 * kUnit);
  s.slowness.assign(7, 1.0);
  s.everyAgreement = true;
  s.fanOut = 2;
  s.controlLatencyS = 0.01;
  const std::uint64_t slices = layoutOf(workload, s.sliceBytes)->slices().size() * s.steps;
  const std::vector<AgreementTraffic> leader = simulate(workload, s).agreement;
  CHECK_EQUAL(leader[0].sentSlices, 2 * slices);
  CHECK_EQUAL(leader[0].receivedMessages, 0U);
  CHECK_EQUAL(leader[1].sentMessages, leader[0].sentMessages); // passes each on, to two as well
  CHECK_EQUAL(leader[1].receivedMessages, leader[0].sentMessages / 2);
  CHECK_EQUAL(leader[6].receivedSlices, slices);
  CHECK_EQUAL(leader[6].sentMessages, 0U);
  s.agreement = AgreementKind::kNegotiated;
  const std::vector<AgreementTraffic> negotiated = simulate(workload, s).agreement;
  CHECK_EQUAL(negotiated[0].receivedSlices, 2 * slices);
  CHECK_EQUAL(negotiated[1].receivedSlices, 3 * slices); // two children's reports, all decisions
  CHECK_EQUAL(negotiated[6].sentSlices, slices);
  s.agreement = AgreementKind::kPlanned;
  s.policy = Policy::kPlanned;
  s.plan.resize(layoutOf(workload, s.sliceBytes)->slices().size());
  std::iota(s.plan.rbegin(), s.plan.rend(), 0);
  for (const AgreementTraffic& half : simulate(workload, s).agreement) {
    CHECK_EQUAL(half.sentMessages + half.receivedMessages, 0U);
  }
}

TEST(aRankThatIsAlwaysLateCostsItsOwnTimeOnly) {
  // Ten layers like each other and one behind them whose gradient, ready first, takes the link for
  // 24 s. Alone, the late rank needs 39.6 s a step. Each of the ten gradients is ready 0.4 to 4 s
  // earlier on rank 0; if it had the link from then on, the large one would not arrive in time.
  std::vector<Layer> layers(10, Layer{1, 2, kUnit});
  layers.push_back({1, 2, 24 * kUnit});
  Scenario s = scenario(kUnit, kUnit);
  s.slowness = {1, 1.2};
  s.steps = 10;
  const double leader = simulate(chain(layers), s).stepS.back();
  s.agreement = AgreementKind::kNegotiated;
  CHECK_NEAR(leader, simulate(chain(layers), s).stepS.back());
  CHECK(leader < 40.7);
}

TEST(stragglersSlowEverybodyDown) {
  // One layer, forward 1, backward 1, gradient 1 s. Alone 3 s a step; a rank of twice the times has
  // its gradient after 4 s and begins again at 5.
  const Workload workload = chain({{1, 1, kUnit}});
  for (const AgreementKind kind : {AgreementKind::kLeader, AgreementKind::kNegotiated}) {
    Scenario s = scenario(kUnit, kUnit);
    s.agreement = kind;
    CHECK_NEAR(simulate(workload, s).stepS.back(), 3);
    s.slowness = {1, 2, 1};
    CHECK_NEAR(simulate(workload, s).stepS.back(), 5);
    s.slowness = {2, 1, 1};
    CHECK_NEAR(simulate(workload, s).stepS.back(), 5);
    s.controlLatencyS = 0.25; // a leader that is late tells the others; the others' reports are in
    CHECK_NEAR(simulate(workload, s).stepS.back(), 5.25);
    s.slowness = {
        1, 2, 1}; // a leader's decision has long come; a report takes its way there and back
    CHECK_NEAR(simulate(workload, s).stepS.back(), kind == AgreementKind::kLeader ? 5.0 : 5.5);
  }
}

TEST(aStandstillNamesWhatWaits) {
  // Two tensors share a slice; the op that awaits the first runs before the second is produced.
  const Workload workload(
      {{.name = "first", .seconds = 1, .reads = {0}, .produces = {0}},
       {.name = "norm", .seconds = 1, .inputs = {0}, .awaits = {0}},
       {.name = "second", .seconds = 1, .inputs = {1}, .produces = {1}}},
      {{"early", 16}, {"late", 16}});
  const std::string message =
      CHECK_THROWS(InvalidUsage, simulate(workload, scenario(kUnit * 8, kUnit * 8)));
  CHECK_CONTAINS(message, "op 'norm' waits for 'early'");
  CHECK_CONTAINS(message, "slice 'early..late' lacks the gradient of 'late'");

  // A plan that lists a slice first which comes after the one that is awaited.
  Scenario planned = scenario(kUnit, kUnit);
  planned.agreement = AgreementKind::kPlanned;
  planned.policy = Policy::kPlanned;
  planned.plan = {1, 0};
  const Workload apart(workload.ops(), {{"early", kUnit}, {"late", kUnit}});
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, simulate(apart, planned)),
      "slice 'early' is ready, but slice 'late' has to go first");

  // Two streams in program order that wait for each other.
  const Workload crossed(
      {{.name = "a", .seconds = 1, .inputs = {3}},
       {.name = "b", .seconds = 1},
       {.name = "c", .seconds = 1, .inputs = {0}, .stream = 1},
       {.name = "d", .seconds = 1, .stream = 1}},
      {});
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, simulate(crossed, scenario(kUnit, kUnit))),
      "op 'a' waits for op 'd'");
}

TEST(mistakesAreNamed) {
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, Workload({}, {})), "without ops");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, Workload({{.name = "a", .seconds = 1, .inputs = {0}}}, {})),
      "op 'a' needs its own result");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, Workload({{.name = "a", .seconds = -1}}, {})), "op 'a' takes -1");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, Workload({{.name = "a", .seconds = 1, .reads = {2}}}, {{"w", 4}})),
      "op 'a' reads parameter number 2; there are 1");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, Workload({{.name = "a", .seconds = 1, .reads = {0}}}, {{"w", 4}})),
      "no op produces a gradient for parameter 'w'");
  const Workload workload = chain({{1, 1, kUnit}});
  Scenario s = scenario(kUnit, kUnit);
  s.steps = 0;
  CHECK_THROWS(InvalidUsage, simulate(workload, s));
  s = scenario(kUnit, kUnit);
  s.slowness = {};
  CHECK_THROWS(InvalidUsage, simulate(workload, s));
  s.slowness = {0};
  CHECK_THROWS(InvalidUsage, simulate(workload, s));
  s = scenario(kUnit, kUnit);
  s.creditBytes = kUnit - 1;
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, simulate(workload, s)), "credit");
  s = scenario(kUnit, kUnit);
  s.controlSendS = -1;
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, simulate(workload, s)), "sender");
  s = scenario(kUnit, kUnit);
  s.fanOut = 0;
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, simulate(workload, s)), "0 children");
  s = scenario(kUnit, kUnit, {.latencyS = -1});
  CHECK_THROWS(InvalidUsage, simulate(workload, s));
}

} // namespace hvd_order::simulate
