#include "scheduler/scheduler.h"

#include <deque>
#include <map>

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

using Keys = std::vector<SliceKey>;
using Tensors = std::vector<TensorKey>;
using Log = std::vector<std::string>;

constexpr ByteCount kUnit = 64; // one slice

std::shared_ptr<const SliceLayout> layoutOf(std::vector<TensorSpec> tensors) {
  return std::make_shared<SliceLayout>(std::move(tensors), kUnit);
}

// Consumption order conv1, conv2, fc; fc is two slices. Slices: 0 conv1, 1 conv2, 2 fc[0], 3 fc[1].
std::shared_ptr<const SliceLayout> network() {
  return layoutOf({{"conv1", kUnit, 0}, {"conv2", kUnit, 0}, {"fc", 2 * kUnit, 0}});
}

// The same, split. Slices: 0 squares; 1 to 4 the sums of conv1, conv2, fc[0] and fc[1]; 5 to 8
// their parts.
std::shared_ptr<const SliceLayout> splitNetwork() {
  return std::make_shared<SliceLayout>(
      std::vector<TensorSpec>{{"conv1", kUnit, 0}, {"conv2", kUnit, 0}, {"fc", 2 * kUnit, 0}},
      kUnit, true, true);
}

void offer(Scheduler& scheduler, const Keys& slices) {
  for (const SliceKey slice : slices) {
    scheduler.offer(slice);
  }
}

void readyAndOffer(Scheduler& scheduler, TensorKey tensor) {
  offer(scheduler, scheduler.tensorReady(tensor));
}

Keys nextAll(Scheduler& scheduler) {
  Keys issued;
  while (const auto slice = scheduler.next()) {
    issued.push_back(*slice);
  }
  return issued;
}

/// A link that carries one slice a tick in the order of issue, as one stream does.
/// @param ready tensors of model 0 by the tick at which they become ready.
/// @return what the link carried, one entry a tick; "-" when it was idle.
Log runLink(Scheduler& scheduler, const std::multimap<int, TensorId>& ready, int ticks) {
  Log log;
  std::deque<SliceKey> link;
  for (int tick = 0; tick < ticks; ++tick) {
    const auto [from, to] = ready.equal_range(tick);
    for (auto it = from; it != to; ++it) {
      readyAndOffer(scheduler, {0, it->second});
    }
    for (const SliceKey slice : nextAll(scheduler)) {
      link.push_back(slice);
    }
    if (link.empty()) {
      log.emplace_back("-");
      continue;
    }
    log.push_back(scheduler.layout(0).sliceName(link.front().index));
    scheduler.sliceDone(link.front());
    link.pop_front();
  }
  return log;
}

} // namespace

TEST(frontLayerOvertakesBacklog) {
  // tick     0      1      2      3
  // ready    fc     conv2
  //                 conv1
  // link     fc[0]  conv1  conv2  fc[1]    fc has two slices; conv1 is needed first
  Scheduler scheduler(Policy::kPriority, kUnit);
  scheduler.addModel(0, network());
  CHECK_EQUAL(
      runLink(scheduler, {{0, 2}, {1, 1}, {1, 0}}, 5),
      Log{"fc[0]", "conv1", "conv2", "fc[1]", "-"});
}

TEST(arrivalOrderLetsNothingOvertake) {
  // link     fc[0]  fc[1]  conv2  conv1
  Scheduler scheduler(Policy::kArrival, kUnit);
  scheduler.addModel(0, network());
  CHECK_EQUAL(
      runLink(scheduler, {{0, 2}, {1, 1}, {1, 0}}, 5),
      Log{"fc[0]", "fc[1]", "conv2", "conv1", "-"});
}

TEST(thePlanIsFollowedAndWaitedFor) {
  // tick     0      1      2      3      4      5
  // ready    conv1  fc            conv2                plan: conv2 fc[1] conv1 fc[0]
  // link     -      -      -      conv2  fc[1]  conv1
  Scheduler scheduler(Policy::kPlanned, kUnit);
  scheduler.addModel(0, network(), {1, 3, 0, 2});
  CHECK_EQUAL(
      runLink(scheduler, {{0, 0}, {1, 2}, {3, 1}}, 7),
      Log{"-", "-", "-", "conv2", "fc[1]", "conv1", "fc[0]"});
  // Round and round: the next step starts at the plan's head.
  CHECK_EQUAL(
      runLink(scheduler, {{0, 0}, {0, 1}, {0, 2}}, 4), Log{"conv2", "fc[1]", "conv1", "fc[0]"});
}

TEST(creditAndPolicyCanChangeBetweenSteps) {
  Scheduler scheduler(Policy::kPriority, 64);
  const auto layout =
      std::make_shared<SliceLayout>(std::vector<TensorSpec>{{"a", 64, 0}, {"b", 64, 0}}, 64);
  scheduler.addModel(0, layout);
  const auto issued = [&] {
    std::vector<SliceIndex> order;
    for (const TensorId tensor : {1U, 0U}) {
      for (const SliceKey slice : scheduler.tensorReady({0, tensor})) {
        scheduler.offer(slice);
      }
    }
    while (const auto slice = scheduler.next()) {
      order.push_back(slice->index);
    }
    return order;
  };
  CHECK_EQUAL(issued().size(), 1U); // the credit is one slice
  scheduler.sliceDone({0, 0});
  CHECK_EQUAL(scheduler.next()->index, 1U);
  scheduler.sliceDone({0, 1});

  scheduler.retune(Policy::kArrival, 128);
  const std::vector<SliceIndex> order = issued();
  CHECK_EQUAL(order.size(), 2U);
  CHECK_EQUAL(order[0], 1U);

  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, scheduler.retune(Policy::kArrival, 63)), "63 bytes");
  CHECK_THROWS(InvalidUsage, scheduler.retune(Policy::kPlanned, 128));
}

TEST(duringAHoldOnlySmallSlicesBegin) {
  Scheduler scheduler(Policy::kPriority, 8 * kUnit);
  scheduler.addModel(
      0,
      std::make_shared<SliceLayout>(
          std::vector<TensorSpec>{{"small", kUnit, 0}, {"large", 4 * kUnit, 1}}, 4 * kUnit));
  readyAndOffer(scheduler, {0, 1});
  scheduler.reserve(kUnit);
  CHECK(!scheduler.next());
  readyAndOffer(scheduler, {0, 0});
  CHECK_EQUAL(scheduler.next()->index, 0U); // more urgent, and small
  CHECK(!scheduler.next());
  scheduler.reserve(Scheduler::kAnySize);
  CHECK_EQUAL(scheduler.next()->index, 1U);
}

TEST(aFollowerTakesOnlyWhatIsReadyAndFits) {
  Scheduler scheduler(Policy::kPriority, kUnit);
  scheduler.addModel(0, network());
  CHECK(!scheduler.take({7, 0})); // no such model here yet
  CHECK(!scheduler.take({0, 1})); // not ready
  scheduler.tensorReady({0, 1});
  scheduler.tensorReady({0, 0});
  CHECK(scheduler.take({0, 1}));
  CHECK(!scheduler.take({0, 1})); // in flight already
  CHECK(!scheduler.take({0, 0})); // no credit
  scheduler.sliceDone({0, 1});
  CHECK(scheduler.take({0, 0}));
}

TEST(aModelLeavesWhenItIsIdleAndItsIdCanBeUsedAgain) {
  Scheduler scheduler(Policy::kPriority, kUnit);
  scheduler.addModel(0, network());
  readyAndOffer(scheduler, {0, 0});
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, scheduler.removeModel(0)), "still has gradients");
  nextAll(scheduler);
  scheduler.sliceDone({0, 0});
  scheduler.removeModel(0);
  CHECK(!scheduler.hasModel(0));
  scheduler.addModel(0, layoutOf({{"other", 16, 0}}));
  readyAndOffer(scheduler, {0, 0});
  CHECK_EQUAL(nextAll(scheduler), Keys{{0, 0}});
}

TEST(aGradientOfTheNextStepWaitsForTheSquaresOfThisOne) {
  Scheduler scheduler(Policy::kPriority, 8 * kUnit);
  scheduler.addModel(
      0, std::make_shared<SliceLayout>(std::vector<TensorSpec>{{"a", 16, 0}}, kUnit, true, true));
  for (int step = 0; step < 3; ++step) {
    scheduler.tensorReady({0, 0});
    for (const SliceIndex half : {1U, 2U}) {
      CHECK(scheduler.take({0, half}));
      scheduler.sliceDone({0, half});
    }
    CHECK(!scheduler.isPending({0, 0}));
    const auto refused = [&] {
      CHECK_CONTAINS(
          CHECK_THROWS(InvalidUsage, scheduler.tensorReady({0, 0})), "before the squares");
    };
    refused(); // the tensor of the squares has not come
    CHECK_EQUAL(scheduler.tensorReady({0, 1}), Keys{{0, 0}});
    refused();
    CHECK(scheduler.take({0, 0}));
    refused();
    CHECK_EQUAL(scheduler.sliceDone({0, 0}), Tensors{{0, 1}});
    CHECK_EQUAL(scheduler.readyCount({0, 0}), static_cast<std::uint32_t>(step + 1));
  }
}

TEST(mistakesOfTheUserAreNamed) {
  CHECK_THROWS(InvalidUsage, Scheduler(Policy::kPriority, 0));
  Scheduler scheduler(Policy::kPriority, kUnit);
  CHECK_CONTAINS(
      CHECK_THROWS(
          InvalidUsage,
          scheduler.addModel(
              0, std::make_shared<SliceLayout>(std::vector<TensorSpec>{{"a", 128, 0}}, 128))),
      "raise the credit or cut finer");
  CHECK(!scheduler.hasModel(0)); // a refused model leaves nothing behind
  scheduler.addModel(0, network());
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, scheduler.addModel(0, network())), "already");
  CHECK_THROWS(InvalidUsage, scheduler.addModel(SliceKey::kMaxModels, network()));
  CHECK_THROWS(InvalidUsage, scheduler.addModel(1, network(), {0, 1, 2, 3}));
  CHECK_THROWS(InvalidUsage, scheduler.tensorReady({9, 0}));
  CHECK_THROWS(InvalidUsage, scheduler.tensorReady({0, 3}));
  CHECK_THROWS(InvalidUsage, scheduler.removeModel(9));
  scheduler.tensorReady({0, 1});
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, scheduler.tensorReady({0, 1})), "'conv2'");
  CHECK_EQUAL(scheduler.readyCount({0, 1}), 1U);
}

TEST(aPlanListsEachSliceOnce) {
  Scheduler scheduler(Policy::kPlanned, kUnit);
  using Plan = std::vector<SliceIndex>;
  for (const Plan& plan : {Plan{}, Plan{0, 1, 2}, Plan{0, 1, 2, 2}, Plan{0, 1, 2, 4}}) {
    CHECK_CONTAINS(
        CHECK_THROWS(InvalidUsage, scheduler.addModel(0, network(), plan)), "make the plan again");
  }
  scheduler.addModel(0, network(), {3, 2, 1, 0});
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, scheduler.addModel(1, network(), {3, 2, 1, 0})), "one model");
}

TEST(aPlanListsSumsBeforeWhatWaitsForThem) {
  Scheduler scheduler(Policy::kPlanned, kUnit);
  CHECK_CONTAINS(
      CHECK_THROWS(
          InvalidUsage, scheduler.addModel(0, splitNetwork(), {4, 3, 6, 2, 7, 1, 0, 5, 8})),
      "'parts of conv2' before 'sum of conv2'");
  CHECK_CONTAINS(
      CHECK_THROWS(
          InvalidUsage, scheduler.addModel(0, splitNetwork(), {4, 3, 2, 0, 7, 1, 5, 6, 8})),
      "'squares' before 'sum of conv1'");
  CHECK(!scheduler.hasModel(0));
  scheduler.addModel(0, splitNetwork(), {4, 8, 3, 7, 2, 6, 1, 5, 0});
}

TEST(mistakesOfOursAreCaught) {
  Scheduler scheduler(Policy::kPriority, kUnit);
  scheduler.addModel(0, network());
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, scheduler.sliceDone({0, 2})), "fc[0]");
  CHECK_THROWS(BrokenInvariant, scheduler.offer({0, 4}));
  scheduler.offer({0, 0});
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, scheduler.next()), "conv1");
  CHECK_EQUAL(scheduler.inFlightBytes(), 0);
}

} // namespace hvd_order
