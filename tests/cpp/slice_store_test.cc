#include "servers/slice/slice_store.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.h"
#include "server_world.h"

namespace hvd_order {

namespace {

using test::floatsOf;
using test::payloadOf;

const SliceShape kSums{8, ElementType::kFloat32, {}};
const SliceShape kUpdates{8, ElementType::kFloat32, {{0, 2, 0}}};

RuleBook book(std::vector<std::pair<Round, double>> rates) { // since, learning rate
  RuleBook rules;
  for (const auto& [since, lr] : rates) {
    const auto number = static_cast<RulesNumber>(rules.size() + 1);
    rules[number] = {
        since, std::make_shared<const Rules>(Rules{{.kind = RuleKind::kSgd, .lr = lr}})};
  }
  return rules;
}

Payload of(float a, float b) {
  return payloadOf(std::vector<float>{a, b});
}

} // namespace

TEST(aRoundIsAppliedWhenItIsWholeInRankOrder) {
  std::vector<int> order(4);
  std::iota(order.begin(), order.end(), 0);
  // In another order the sums would differ.
  const std::vector<float> values{1e8F, 1, -1e8F, 0.5F};
  const float inRankOrder = ((values[0] + values[1]) + values[2]) + values[3];
  do {
    SliceStore slice(kSums, false, Consistency::kSynchronous, 4);
    slice.begin({});
    for (std::size_t i = 0; i < order.size(); ++i) {
      CHECK(!slice.advance({}, false));
      const int rank = order[i];
      slice.push(rank, 1, of(values[static_cast<std::size_t>(rank)], 0));
    }
    CHECK(slice.missing().empty());
    const auto update = slice.advance({}, false);
    CHECK(update && update->worker == SliceStore::kEveryWorker && update->round == 1);
    CHECK_EQUAL(floatsOf(update->sum)[0], inRankOrder);
    CHECK(!slice.advance({}, false));
    CHECK(!slice.waits());
    CHECK_EQUAL(slice.state().version, 1U);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(rulesHoldFromTheirRoundOn) {
  SliceStore slice(kUpdates, true, Consistency::kSynchronous, 1);
  slice.begin(of(0, 0));
  const RuleBook rules = book({{1, 1.0}, {3, 10.0}});
  for (Round round = 1; round <= 3; ++round) {
    slice.push(0, round, of(1, 0));
    CHECK(!slice.advance({}, false)); // without rules nothing
    const auto update = slice.advance(rules, true);
    CHECK_EQUAL(update->rules, round < 3 ? 1U : 2U);
    CHECK_EQUAL(update->change, round < 3 ? 1.0 : 10.0);
  }
  CHECK_EQUAL(floatsOf(slice.state().value)[0], -12.0F);
  slice.needRules(3);
  slice.push(0, 4, of(1, 0));
  CHECK(!slice.advance(rules, false));
  CHECK(slice.advance(book({{1, 1.0}, {3, 1.0}, {7, 1.0}}), false).has_value());
}

TEST(anAnswerUnderWayKeepsItsValue) {
  SliceStore slice(kUpdates, true, Consistency::kSynchronous, 1);
  slice.begin(of(5, 5));
  const Payload underWay = slice.state().value;
  slice.push(0, 1, of(1, 1));
  CHECK(slice.advance(book({{1, 1.0}}), false).has_value());
  CHECK_EQUAL(floatsOf(underWay), std::vector<float>{5, 5});
  CHECK_EQUAL(floatsOf(slice.state().value), std::vector<float>{4, 4});
}

TEST(oneThatFollowsHasTheSameAndNothingTwice) {
  SliceStore owner(kUpdates, true, Consistency::kAsynchronous, 2);
  SliceStore replica(kUpdates, true, Consistency::kAsynchronous, 2);
  owner.begin(of(0, 0));
  const RuleBook rules = book({{1, 0.5}, {2, 0.25}});
  replica.install(owner.state());
  owner.push(1, 1, of(4, 8));
  const auto first = owner.advance(rules, false);
  owner.push(1, 2, of(4, 8));
  const auto second = owner.advance(rules, false);
  CHECK_THROWS(FrameError, replica.follow(*second, 2, rules));
  CHECK(replica.follow(*first, 1, rules));
  CHECK_THROWS(FrameError, replica.follow(*first, 1, rules));
  CHECK(!replica.follow(*second, 2, book({{1, 0.5}}))); // its rules are to come
  CHECK(replica.follow(*second, 2, rules));
  CHECK_EQUAL(floatsOf(replica.state().value), floatsOf(owner.state().value));
  CHECK_EQUAL(replica.state().seen, owner.state().seen);
}

TEST(ofTwoPushesTheLaterStaysAndWhatIsAppliedIsTakenOut) {
  SliceStore slice(kSums, false, Consistency::kSynchronous, 2);
  slice.push(0, 2, of(2, 2));
  slice.push(0, 1, of(1, 1));
  slice.push(1, 1, of(1, 1));
  CHECK(slice.missing().empty());
  SliceState state;
  state.version = 1;
  state.seen = {1, 1};
  state.skipped = {0, 0};
  slice.install(std::move(state));
  CHECK(slice.takeApplied() == std::vector<std::pair<int, Round>>{{1, 1}});
  CHECK_EQUAL(slice.missing(), std::vector<int>{1});
  slice.push(1, 2, of(3, 3));
  CHECK_EQUAL(floatsOf(slice.advance({}, false)->sum), std::vector<float>{5, 5});
}

TEST(aRoundThatWasLostIsNotWaitedForIfUpdatesMayBe) {
  SliceStore slice(
      kUpdates, true, Consistency::kSynchronous, 2,
      /*mayMiss=*/true);
  slice.begin(of(0, 0));
  slice.push(0, 1, of(1, 1)); // again, as its answer was lost
  slice.push(1, 2, of(1, 1)); // has its answer to round 1
  CHECK(slice.takeApplied() == std::vector<std::pair<int, Round>>{{0, 1}});
  slice.push(0, 2, of(1, 1));
  const auto update = slice.advance(book({{1, 1.0}}), false);
  CHECK_EQUAL(update->round, 2U);
  CHECK_EQUAL(slice.state().version, 1U);
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
