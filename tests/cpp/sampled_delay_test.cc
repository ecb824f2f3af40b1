#include <algorithm>
#include <random>
#include <string>

#include "base/error.h"
#include "check.h"
#include "planning/sampled/sampled_training.h"

// Bounded delay and aggregation in sampled training: traces by hand, and the bound itself in random
// trainings. A step is a pull, a second of computation and a push of 10 bytes; a worker's link
// carries a byte a second.

namespace hvd_order::simulate {

namespace {

SampledStep oneTensor() {
  return SampledStep(
      {{"pull", SampledKind::kPull, {}},
       {"compute", SampledKind::kCompute, {0}},
       {"push", SampledKind::kPush, {1}}},
      {10}, {{0, 1, 0}});
}

SampledTraining training(std::vector<double> startsS, std::uint32_t bound) {
  SampledTraining training;
  training.slowness.assign(startsS.size(), 1.0);
  training.startsS = std::move(startsS);
  training.serverBytesPerS = 1000;
  training.pullStart = PullStart::kAnswer;
  training.stepEnd = SampledStepEnd::kComputed;
  training.delayBound = bound;
  training.steps = 2;
  return training;
}

void checkTimes(const std::vector<double>& found, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CHECK(i < found.size() && std::abs(found[i] - expected[i]) < 1e-9);
  }
}

// Worker 0 pushes from 1 to 11. Worker 1 asks at 1.5, when the next update is worker 0's: with a
// bound of 0 its own would be late. It gets the present value at once, from 1.5 to 11.5, and asks
// again at 12.5 with a value that misses worker 0's update: late again. Worker 0 has its answer at
// 21, and ends its second step at 22.
TEST(a_late_update_is_not_sent) {
  const SampledResult found = simulateSampled(oneTensor(), training({0, 0.5}, 0));
  checkTimes(found.stepEndsS[0], {1, 22});
  checkTimes(found.stepEndsS[1], {1.5, 12.5});
  CHECK_EQUAL(found.lateUpdates, 2U);
  CHECK_EQUAL(found.longestDelay, 0U);
}

// With a bound of 1 worker 1 waits until worker 0's update is applied at 11, and pushes from 11 to
// 21. Its answer comes at 31.
TEST(one_worker_pushes_a_tensor_at_a_time) {
  const SampledResult found = simulateSampled(oneTensor(), training({0, 0.5}, 1));
  checkTimes(found.stepEndsS[0], {1, 22});
  checkTimes(found.stepEndsS[1], {1.5, 32});
  CHECK_EQUAL(found.lateUpdates, 0U);
  CHECK_EQUAL(found.longestDelay, 1U);
}

// Requests and admissions take the latency of a message each way, and so do the push and its
// answer: 1 + 0.25 + 0.25 + 10 + 0.25 + 10 + 0.25 + 1.
TEST(asking_takes_a_round_trip) {
  SampledTraining with = training({0}, 3);
  with.pull.latencyS = with.push.latencyS = 0.25;
  const SampledResult found = simulateSampled(oneTensor(), with);
  checkTimes(found.stepEndsS[0], {1, 23});
}

// Nothing is admitted while an update waits to be applied: worker 0's takes from 11 to 14, so
// worker 1 pushes from 14 to 24, has its update at 27 and its answer at 37.
TEST(the_next_push_waits_for_the_update) {
  SampledTraining slow = training({0, 0.5}, 1);
  slow.updateSeconds = 3;
  const SampledResult found = simulateSampled(oneTensor(), slow);
  checkTimes(found.stepEndsS[0], {1, 25});
  checkTimes(found.stepEndsS[1], {1.5, 38});
}

// Two servers with links of 2 bytes a second; server 0 owns the tensor. Worker 0 asks first, alone,
// and pushes to the owner from 1 to 11. Then workers 1 and 2 wait, and server 1 has not been tried:
// both push to it until 21. Its sum travels from 21 to 26, the owner's answer from 26 to 31, and
// both workers have it at 41. Worker 0, which has had its answer at 21 and asked at 22, pushes from
// 26 to 36, has its answer at 46 and ends its third step at 47.
TEST(a_helper_adds_updates_for_the_owner) {
  SampledTraining helped = training({0, 0, 0}, 10);
  helped.servers = 2;
  helped.serverBytesPerS = 2;
  helped.aggregates = true;
  const SampledResult found = simulateSampled(oneTensor(), helped);
  checkTimes(found.stepEndsS[0], {1, 22});
  checkTimes(found.stepEndsS[1], {1, 42});
  checkTimes(found.stepEndsS[2], {1, 42});
  CHECK_EQUAL(found.aggregatedUpdates, 2U);
  CHECK_EQUAL(found.lateUpdates, 0U);
  CHECK_EQUAL(found.longestDelay, 2U);       // of worker 2, and of worker 0's second update
  checkTimes(found.pushBusyS, {25, 15});     // owner: pushes from 1 and 26, and the sum
  checkTimes(found.pullBusyS, {15 + 6, 15}); // owner: answers from 11 and 36, and that to the sum
}

// The helper's sum takes its time too, and that of the owner's update is spent once for both.
TEST(a_sum_is_work_of_the_helper) {
  SampledTraining helped = training({0, 0, 0}, 10);
  helped.servers = 2;
  helped.serverBytesPerS = 2;
  helped.aggregates = true;
  helped.updateSeconds = 1;
  const SampledResult found = simulateSampled(oneTensor(), helped);
  // Worker 0's update ends at 12; pushes 12 to 22, sum until 23, its way until 28, update until 29,
  // answers until 34 and 44.
  checkTimes(found.stepEndsS[1], {1, 45});
  checkTimes(found.stepEndsS[2], {1, 45});
}

TEST(without_a_bound_nothing_changes) {
  SampledTraining loose = training({0, 0.5}, 1000);
  SampledTraining none = loose;
  none.delayBound.reset();
  // One worker has nobody to wait for.
  loose.slowness = none.slowness = {1.0};
  loose.startsS = none.startsS = {0};
  const SampledResult a = simulateSampled(oneTensor(), loose);
  const SampledResult b = simulateSampled(oneTensor(), none);
  CHECK_EQUAL(a.stepEndsS[0].size(), b.stepEndsS[0].size());
  checkTimes(a.stepEndsS[0], b.stepEndsS[0]);
  CHECK_EQUAL(b.longestDelay, 0U);
}

struct Refused {
  SampledTraining training;
  const char* says;
};

TEST(impossible_bounds_are_refused) {
  SampledTraining sync = training({0}, 1);
  sync.mode = ServerMode::kSync;
  SampledTraining request = training({0}, 1);
  request.pullStart = PullStart::kRequest;
  SampledTraining unbounded = training({0}, 1);
  unbounded.delayBound.reset();
  unbounded.aggregates = true;
  for (const Refused& each :
       {Refused{sync, "asynchronous workers"}, Refused{request, "answer each push"},
        Refused{unbounded, "without a delay bound"}}) {
    CHECK_CONTAINS(
        CHECK_THROWS(InvalidUsage, simulateSampled(oneTensor(), each.training)), each.says);
  }
}

// Whatever the training: every step ends, no update is applied beyond the bound, and all updates
// of the ended steps but the last ones are accounted for.
TEST(no_update_is_applied_beyond_the_bound) {
  std::mt19937 random(5);
  const auto below = [&random](std::uint32_t end) { return random() % end; };
  std::uint64_t aggregated = 0;
  std::uint64_t late = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const auto tensors = static_cast<TensorId>(1 + below(4));
    std::vector<SampledOp> ops;
    std::vector<ByteCount> sizes;
    for (TensorId tensor = 0; tensor < tensors; ++tensor) {
      const auto priority = static_cast<std::int32_t>(below(4));
      sizes.push_back(1 + below(20));
      ops.push_back({"pull", SampledKind::kPull, {}, 0, tensor, priority});
      ops.push_back({"compute", SampledKind::kCompute, {3 * tensor}});
      ops.push_back({"push", SampledKind::kPush, {3 * tensor + 1}, 0, tensor, priority});
    }
    std::vector<std::vector<double>> seconds(3, std::vector<double>(ops.size()));
    for (auto& sample : seconds) {
      std::ranges::generate(sample, [&] { return below(8) / 4.0; });
    }
    SampledTraining with;
    with.slowness.resize(1 + below(6));
    std::ranges::generate(with.slowness, [&] { return 1 + below(3); });
    with.servers = 1 + below(3);
    with.workerBytesPerS = 1 + below(4);
    with.serverBytesPerS = 1 + below(8);
    with.push.latencyS = with.pull.latencyS = below(2) / 8.0;
    with.push.turns = with.pull.turns = Turns::kPriority;
    with.push.sharing = with.pull.sharing = below(4) == 0 ? Sharing::kFifo : Sharing::kFair;
    with.push.receiveSecondsPerByte = below(2) / 8.0;
    with.pullStart = PullStart::kAnswer;
    with.stepEnd = std::vector{
        SampledStepEnd::kComputed, SampledStepEnd::kPushed, SampledStepEnd::kUpdated}[below(3)];
    with.delayBound = below(8);
    with.aggregates = below(2) == 0;
    if (below(3) == 0) {
      with.staleness = below(4);
    }
    with.updateSeconds = below(3) / 4.0;
    with.updateLanes = 1 + below(2);
    with.spreadS = 3;
    with.seed = static_cast<std::uint64_t>(trial);
    with.steps = 12;
    const SampledResult found = simulateSampled(SampledStep(ops, sizes, seconds), with);
    CHECK(found.longestDelay <= *with.delayBound);
    std::size_t ended = 0;
    for (const auto& ends : found.stepEndsS) {
      CHECK(ends.size() >= with.steps);
      CHECK(std::ranges::is_sorted(ends));
      ended += ends.size();
    }
    CHECK(found.lateUpdates <= (ended + found.stepEndsS.size()) * tensors);
    aggregated += found.aggregatedUpdates;
    late += found.lateUpdates;
  }
  CHECK(aggregated > 100);
  CHECK(late > 100);
}

} // namespace

} // namespace hvd_order::simulate
