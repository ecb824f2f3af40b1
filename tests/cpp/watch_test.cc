#include "engine/watch.h"

#include <vector>

#include "base/error.h"
#include "check.h"

// Timelines of a watch, by hand: no test here waits.

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Kind = Watch::Action::Kind;
using Time = Watch::Clock::time_point;

const Time kStart = Time() + 1h;
constexpr Watch::Limits kLimits{.timeout = 100s, .warning = 10s};
const std::vector<ModelId> kNothing;
const std::vector<ModelId> kFirst{0};
const std::vector<ModelId> kSecond{1};
const std::vector<ModelId> kBoth{0, 1};

/// Rank 1 of `size`, with models 0 and 1.
Watch watchOf(int size, Watch::Limits limits = kLimits) {
  Watch watch(1, size, limits, kStart);
  watch.addModel(0, kStart);
  watch.addModel(1, kStart);
  return watch;
}

Kind kindAt(Watch& watch, Time now, const std::vector<ModelId>& underWay = kFirst) {
  return watch.look(now, underWay).kind;
}

template <typename T>
std::string failureAt(Watch& watch, Time now, const std::vector<ModelId>& underWay = kNothing) {
  const Watch::Action action = watch.look(now, underWay);
  CHECK(action.kind == Kind::kFail);
  return CHECK_THROWS(T, std::rethrow_exception(action.error));
}

template <typename T>
std::exception_ptr error(const std::string& text) {
  return std::make_exception_ptr(T(text));
}

} // namespace

TEST(aStallIsAskedAboutThenWarnedOfThenAnError) {
  Watch watch = watchOf(3);
  Time now = watch.nextLook(kStart, kFirst);
  CHECK(now == kStart + 10s);
  CHECK(kindAt(watch, now - 1ns) == Kind::kNone);
  const Watch::Action question = watch.look(now, kFirst);
  CHECK(question.kind == Kind::kAsk);
  CHECK_EQUAL(question.model, 0U);
  CHECK(kindAt(watch, now) == Kind::kNone); // once

  now = watch.nextLook(now, kFirst);
  CHECK(now == kStart + 11s); // the answers have had a second
  CHECK(kindAt(watch, now - 1ns) == Kind::kNone);
  const Watch::Action warning = watch.look(now, kFirst);
  CHECK(warning.kind == Kind::kWarn);
  CHECK(warning.stalled == 11s);
  CHECK(kindAt(watch, now) == Kind::kNone);

  now = watch.nextLook(now, kFirst);
  CHECK(now == kStart + 100s); // and nothing before
  CHECK(kindAt(watch, now - 1ns) == Kind::kNone);
  CHECK(kindAt(watch, now) == Kind::kTimeOut);
  CHECK(watch.hasAsked());
}

TEST(aLateWarningDoesNotDelayTheQuestion) {
  Watch watch = watchOf(2, {.timeout = 8s, .warning = 10s});
  CHECK(watch.nextLook(kStart, kFirst) == kStart + 4s);
  CHECK(kindAt(watch, kStart + 4s) == Kind::kAsk);
  CHECK(watch.nextLook(kStart, kFirst) == kStart + 8s);
  CHECK(kindAt(watch, kStart + 8s) == Kind::kTimeOut);
}

TEST(whatMovesOrIsNotUnderWayIsNoStall) {
  Watch watch = watchOf(2);
  CHECK(kindAt(watch, kStart + 200s, kNothing) == Kind::kNone);
  // Nobody says when an exchange begins, so the watch looks now and then.
  CHECK(watch.nextLook(kStart + 200s, kNothing) == kStart + 202500ms);
  watch.progress(0, kStart + 200s);
  CHECK(kindAt(watch, kStart + 209s) == Kind::kNone);
  CHECK(kindAt(watch, kStart + 210s) == Kind::kAsk);
  watch.progress(0, kStart + 210500ms);
  CHECK(!watch.hasAsked());
  CHECK(kindAt(watch, kStart + 211s) == Kind::kNone);
  CHECK(kindAt(watch, kStart + 220500ms) == Kind::kAsk); // another stall
  CHECK(kindAt(watch, kStart + 221500ms) == Kind::kWarn);
}

TEST(withoutModelsNothingIsWatched) {
  Watch watch = watchOf(2);
  watch.removeModel(0);
  CHECK(kindAt(watch, kStart + 200s) == Kind::kNone); // an id that is no model's any more
  watch.removeModel(1);
  CHECK(watch.nextLook(kStart, kNothing) == Time::max());
  watch.progress(7, kStart); // no such model
  CHECK(kindAt(watch, kStart + 200s, {7}) == Kind::kNone);
}

TEST(theModelThatStandsStillLongestIsAskedFor) {
  Watch watch = watchOf(2);
  watch.progress(0, kStart + 5s);
  CHECK_EQUAL(watch.look(kStart + 10s, kBoth).model, 1U);
  watch.progress(0, kStart + 10500ms); // the other one's progress does not count for it
  CHECK(kindAt(watch, kStart + 11s, kBoth) == Kind::kWarn);
  // The exchanges of model 1 end, and those of model 0 stall.
  CHECK(watch.nextLook(kStart + 12s, kFirst) == kStart + 20500ms);
  const Watch::Action question = watch.look(kStart + 20500ms, kFirst);
  CHECK(question.kind == Kind::kAsk);
  CHECK_EQUAL(question.model, 0U);
  CHECK(kindAt(watch, kStart + 21500ms) == Kind::kWarn);
}

TEST(aStallIsNearlyTimedOutInTheLastTenth) {
  Watch watch = watchOf(2);
  CHECK(!watch.isNearlyTimedOut(kStart + 95s, kFirst)); // nobody has been asked
  CHECK(kindAt(watch, kStart + 10s) == Kind::kAsk);
  CHECK(!watch.isNearlyTimedOut(kStart + 90s - 1ns, kFirst));
  CHECK(watch.isNearlyTimedOut(kStart + 90s, kFirst));
  CHECK(!watch.isNearlyTimedOut(kStart + 90s, kNothing));
  CHECK(!watch.isNearlyTimedOut(kStart + 90s, kSecond)); // the question was about another model
  watch.end();
  CHECK(!watch.isNearlyTimedOut(kStart + 90s, kFirst));
}

TEST(aFailedTransferWaitsForItsCulprit) {
  Watch watch = watchOf(2);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  watch.transferFailed(error<PeerLost>("another one"), kStart + 100ms); // only the first counts
  CHECK(watch.nextLook(kStart, kFirst) == kStart + 300ms);
  CHECK(kindAt(watch, kStart + 299ms) == Kind::kNone);
  const std::string text = failureAt<PeerLost>(watch, kStart + 300ms);
  CHECK_CONTAINS(text, "rank 1 lost a connection to another rank, though none is known");
  CHECK_CONTAINS(text, "(connection reset)");
}

TEST(aNamedCulpritEndsTheWatch) {
  Watch watch = watchOf(2);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  watch.end();
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  watch.rankLeft(0, kStart);
  CHECK(kindAt(watch, kStart + 200s) == Kind::kNone);
  CHECK(watch.nextLook(kStart, kFirst) == Time::max());
}

TEST(errorsThatNameTheirCauseStay) {
  const auto failure = [](const std::exception_ptr& cause) {
    Watch watch = watchOf(2);
    watch.transferFailed(cause, kStart);
    return watch.look(kStart + 300ms, kNothing).error;
  };
  CHECK_EQUAL(textOf(failure(error<ServerLost>("server 2 is gone"))), "server 2 is gone");
  CHECK_EQUAL(textOf(failure(error<CollectiveError>("shapes differ"))), "shapes differ");
  CHECK_EQUAL(
      textOf(failure(error<DeviceFailed>("no memory"))), "the device of rank 1 failed: no memory");
}

TEST(aSingleProcessNeedNotWaitForACulprit) {
  Watch watch(0, 1, kLimits, kStart);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  CHECK_EQUAL(failureAt<PeerLost>(watch, kStart), "connection reset");
}

TEST(anExchangeThatNeedsARankThatLeftIsStranded) {
  Watch watch = watchOf(3);
  CHECK(!watch.hasRankLeft());
  watch.rankLeft(2, kStart + 1s);
  watch.rankLeft(0, kStart + 2s); // only the first counts
  CHECK(watch.hasRankLeft());
  CHECK(kindAt(watch, kStart + 5s, kNothing) == Kind::kNone);
  CHECK(watch.nextLook(kStart + 1s, kFirst) == kStart + 1300ms);
  watch.progress(0, kStart + 1200ms); // what that rank had finished still arrives
  CHECK(kindAt(watch, kStart + 1499ms) == Kind::kNone);
  CHECK_CONTAINS(
      failureAt<PeerLost>(watch, kStart + 1500ms, kFirst),
      "rank 2 has ended its training, while rank 1 has gradients of a further step");
}

TEST(aTransferThatFailsAfterARankLeftIsStrandedToo) {
  Watch watch = watchOf(3);
  watch.rankLeft(2, kStart);
  watch.transferFailed(error<PeerLost>("connection reset"), kStart);
  CHECK_CONTAINS(failureAt<PeerLost>(watch, kStart + 300ms), "rank 2 has ended its training");
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
