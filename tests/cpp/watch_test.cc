#include "engine/watch.h"

#include <vector>

#include "base/error.h"
#include "check.h"

// Timelines of a watch, by hand: no test here waits.

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Time = StallWatch::Clock::time_point;

const Time kStart = Time() + 1h;
constexpr StallWatch::Limits kLimits{.timeout = 100s, .warning = 10s};
const std::vector<ModelId> kNothing;
const std::vector<ModelId> kFirst{0};
const std::vector<ModelId> kSecond{1};
const std::vector<ModelId> kBoth{0, 1};

/// Rank 1 of `size`, with models 0 and 1.
StallWatch watchOf(int size, StallWatch::Limits limits = kLimits) {
  StallWatch watch(1, size, limits, kStart);
  watch.addModel(0, kStart);
  watch.addModel(1, kStart);
  return watch;
}

ActionKind kindAt(StallWatch& watch, Time now, const std::vector<ModelId>& underWay = kFirst) {
  return watch.look(now, underWay).kind;
}

template <typename T>
std::string
failureAt(StallWatch& watch, Time now, const std::vector<ModelId>& underWay = kNothing) {
  const StallWatch::Action action = watch.look(now, underWay);
  CHECK(action.kind == ActionKind::kFail);
  return CHECK_THROWS(T, std::rethrow_exception(action.error));
}

template <typename T>
std::exception_ptr error(const std::string& text) {
  return std::make_exception_ptr(T(text));
}

} // namespace

TEST(aStallIsAskedAboutThenWarnedOfThenAnError) {
  StallWatch watch = watchOf(3);
  Time now = watch.nextLook(kStart, kFirst);
  CHECK(now == kStart + 10s);
  CHECK(kindAt(watch, now - 1ns) == ActionKind::kNone);
  const StallWatch::Action question = watch.look(now, kFirst);
  CHECK(question.kind == ActionKind::kAsk);
  CHECK_EQUAL(question.model, 0U);
  CHECK(kindAt(watch, now) == ActionKind::kNone); // once

  now = watch.nextLook(now, kFirst);
  CHECK(now == kStart + 11s); // the answers have had a second
  CHECK(kindAt(watch, now - 1ns) == ActionKind::kNone);
  const StallWatch::Action warning = watch.look(now, kFirst);
  CHECK(warning.kind == ActionKind::kWarn);
  CHECK(warning.stalled == 11s);
  CHECK(kindAt(watch, now) == ActionKind::kNone);

  now = watch.nextLook(now, kFirst);
  CHECK(now == kStart + 100s); // and nothing before
  CHECK(kindAt(watch, now - 1ns) == ActionKind::kNone);
  CHECK(kindAt(watch, now) == ActionKind::kTimeOut);
  CHECK(watch.hasAsked());
}

TEST(aLateWarningDoesNotDelayTheQuestion) {
  StallWatch watch = watchOf(2, {.timeout = 8s, .warning = 10s});
  CHECK(watch.nextLook(kStart, kFirst) == kStart + 4s);
  CHECK(kindAt(watch, kStart + 4s) == ActionKind::kAsk);
  CHECK(watch.nextLook(kStart, kFirst) == kStart + 8s);
  CHECK(kindAt(watch, kStart + 8s) == ActionKind::kTimeOut);
}

TEST(whatMovesOrIsNotUnderWayIsNoStall) {
  StallWatch watch = watchOf(2);
  CHECK(kindAt(watch, kStart + 200s, kNothing) == ActionKind::kNone);
  // Nobody says when an exchange begins, so the watch looks now and then.
  CHECK(watch.nextLook(kStart + 200s, kNothing) == kStart + 202500ms);
  watch.progress(0, kStart + 200s);
  CHECK(kindAt(watch, kStart + 209s) == ActionKind::kNone);
  CHECK(kindAt(watch, kStart + 210s) == ActionKind::kAsk);
  watch.progress(0, kStart + 210500ms);
  CHECK(!watch.hasAsked());
  CHECK(kindAt(watch, kStart + 211s) == ActionKind::kNone);
  CHECK(kindAt(watch, kStart + 220500ms) == ActionKind::kAsk); // another stall
  CHECK(kindAt(watch, kStart + 221500ms) == ActionKind::kWarn);
}

TEST(withoutModelsNothingIsWatched) {
  StallWatch watch = watchOf(2);
  watch.removeModel(0);
  CHECK(kindAt(watch, kStart + 200s) == ActionKind::kNone); // an id that is no model's any more
  watch.removeModel(1);
  CHECK(watch.nextLook(kStart, kNothing) == Time::max());
  watch.progress(7, kStart); // no such model
  CHECK(kindAt(watch, kStart + 200s, {7}) == ActionKind::kNone);
}

TEST(theModelThatStandsStillLongestIsAskedFor) {
  StallWatch watch = watchOf(2);
  watch.progress(0, kStart + 5s);
  CHECK_EQUAL(watch.look(kStart + 10s, kBoth).model, 1U);
  watch.progress(0, kStart + 10500ms); // the other one's progress does not count for it
  CHECK(kindAt(watch, kStart + 11s, kBoth) == ActionKind::kWarn);
  // The exchanges of model 1 end, and those of model 0 stall.
  CHECK(watch.nextLook(kStart + 12s, kFirst) == kStart + 20500ms);
  const StallWatch::Action question = watch.look(kStart + 20500ms, kFirst);
  CHECK(question.kind == ActionKind::kAsk);
  CHECK_EQUAL(question.model, 0U);
  CHECK(kindAt(watch, kStart + 21500ms) == ActionKind::kWarn);
}

TEST(aStallIsNearlyTimedOutInTheLastTenth) {
  StallWatch watch = watchOf(2);
  CHECK(!watch.isNearlyTimedOut(kStart + 95s, kFirst)); // nobody has been asked
  CHECK(kindAt(watch, kStart + 10s) == ActionKind::kAsk);
  CHECK(!watch.isNearlyTimedOut(kStart + 90s - 1ns, kFirst));
  CHECK(watch.isNearlyTimedOut(kStart + 90s, kFirst));
  CHECK(!watch.isNearlyTimedOut(kStart + 90s, kNothing));
  CHECK(!watch.isNearlyTimedOut(kStart + 90s, kSecond)); // the question was about another model
  watch.end();
  CHECK(!watch.isNearlyTimedOut(kStart + 90s, kFirst));
}

TEST(aFailedTransferWaitsForItsCulprit) {
  StallWatch watch = watchOf(2);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  watch.transferFailed(error<PeerLost>("another one"), kStart + 100ms); // only the first counts
  CHECK(watch.nextLook(kStart, kFirst) == kStart + 300ms);
  CHECK(kindAt(watch, kStart + 299ms) == ActionKind::kNone);
  const std::string text = failureAt<PeerLost>(watch, kStart + 300ms);
  CHECK_CONTAINS(text, "rank 1 lost a connection to another rank, though none is known");
  CHECK_CONTAINS(text, "(connection reset)");
}

TEST(aNamedCulpritEndsTheWatch) {
  StallWatch watch = watchOf(2);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  watch.end();
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  watch.rankLeft(0, kStart);
  CHECK(kindAt(watch, kStart + 200s) == ActionKind::kNone);
  CHECK(watch.nextLook(kStart, kFirst) == Time::max());
}

TEST(errorsThatNameTheirCauseStay) {
  const auto failure = [](const std::exception_ptr& cause) {
    StallWatch watch = watchOf(2);
    watch.transferFailed(cause, kStart);
    return watch.look(kStart + 300ms, kNothing).error;
  };
  CHECK_EQUAL(textOf(failure(error<ServerLost>("server 2 is gone"))), "server 2 is gone");
  CHECK_EQUAL(textOf(failure(error<CollectiveError>("shapes differ"))), "shapes differ");
  CHECK_EQUAL(
      textOf(failure(error<DeviceFailed>("no memory"))), "the device of rank 1 failed: no memory");
}

TEST(aSingleProcessNeedNotWaitForACulprit) {
  StallWatch watch(0, 1, kLimits, kStart);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  CHECK_EQUAL(failureAt<PeerLost>(watch, kStart), "connection reset");
}

TEST(anExchangeThatNeedsARankThatLeftIsStranded) {
  StallWatch watch = watchOf(3);
  CHECK(!watch.hasRankLeft());
  watch.rankLeft(2, kStart + 1s);
  watch.rankLeft(0, kStart + 2s); // only the first counts
  CHECK(watch.hasRankLeft());
  CHECK(kindAt(watch, kStart + 5s, kNothing) == ActionKind::kNone);
  CHECK(watch.nextLook(kStart + 1s, kFirst) == kStart + 1300ms);
  watch.progress(0, kStart + 1200ms); // what that rank had finished still arrives
  CHECK(kindAt(watch, kStart + 1499ms) == ActionKind::kNone);
  CHECK_CONTAINS(
      failureAt<PeerLost>(watch, kStart + 1500ms, kFirst),
      "rank 2 has ended its training, while rank 1 has gradients of a further step");
}

TEST(aTransferThatFailsAfterARankLeftIsStrandedToo) {
  StallWatch watch = watchOf(3);
  watch.rankLeft(2, kStart);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  CHECK_CONTAINS(failureAt<PeerLost>(watch, kStart + 300ms), "rank 2 has ended its training");
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
