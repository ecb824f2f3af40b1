#include "scheduler/link_reservation.h"

#include "check.h"

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Time = LinkReservation::Clock::time_point;

constexpr Time kStart{1h};
constexpr ByteCount kSize = 64;
constexpr ByteCount kCredit = 8 * kSize; // of which a slice may have an eighth during a reservation

/// Four tensors of kSize, each with a slice of its own.
SliceLayout fourSlices() {
  return SliceLayout({{"a", kSize, 0}, {"b", kSize, 0}, {"c", kSize, 0}, {"d", kSize, 0}}, kSize);
}

enum class State {
  kOff,
  kOn,    // no large slice
  kAlone, // nor beside the first
};
using States = std::vector<State>;

State stateOf(const LinkReservation& reservation) {
  const bool expires = reservation.until() != Time::max();
  if (reservation.largestBytes() == Scheduler::kAnySize) {
    CHECK(!expires);
    return State::kOff;
  }
  CHECK_EQUAL(reservation.largestBytes(), kSize);
  return expires ? State::kAlone : State::kOn;
}

State after(
    LinkReservation& reservation,
    TensorKey tensor,
    const std::vector<SliceKey>& slices,
    Time now) {
  const State before = stateOf(reservation);
  const bool changed = reservation.ready(tensor, slices, now);
  CHECK_EQUAL(changed, stateOf(reservation) != before);
  return stateOf(reservation);
}

/// Where every tensor has a slice of its own.
State after(LinkReservation& reservation, TensorKey tensor, Time now) {
  return after(reservation, tensor, {{tensor.model, tensor.tensor}}, now);
}

/// A backward pass over tensors 3, 2, 1, 0, which are ready after 10, 20, 30 and 40 ms. The first
/// slice arrives at once.
States step(LinkReservation& reservation, Time start) {
  States states;
  for (const TensorId tensor : {3U, 2U, 1U, 0U}) {
    states.push_back(after(reservation, {0, tensor}, start + (4 - tensor) * 10ms));
  }
  CHECK_EQUAL(reservation.done({0, 0}), states.back() == State::kAlone);
  CHECK(stateOf(reservation) == State::kOff);
  return states;
}

/// Has seen a step, holds with a lead of 15 ms, and is now before the first slice of the next one.
LinkReservation heldSince(Time start) {
  LinkReservation reservation;
  reservation.addModel(0, fourSlices());
  reservation.retune(15ms, kCredit);
  step(reservation, start - 1s);
  CHECK(after(reservation, {0, 2}, start + 20ms) == State::kOn);
  CHECK(after(reservation, {0, 1}, start + 30ms) == State::kOn);
  return reservation;
}

constexpr State kOff = State::kOff;
constexpr State kOn = State::kOn;
constexpr State kAlone = State::kAlone;

} // namespace

TEST(theReservationBeginsOneLeadBeforeTheFirstSlice) {
  LinkReservation reservation;
  reservation.addModel(0, fourSlices());
  reservation.retune(15ms, kCredit);
  CHECK(step(reservation, kStart) == (States{kOff, kOff, kOff, kOff})); // nothing known yet
  // Tensor 1 comes 10 ms before the first, tensor 2 comes 20 ms before.
  CHECK(step(reservation, kStart + 1s) == (States{kOff, kOn, kOn, kAlone}));
  reservation.retune(10ms, kCredit);
  CHECK(step(reservation, kStart + 2s) == (States{kOff, kOn, kOn, kAlone}));
  CHECK(step(reservation, kStart + 3s) == (States{kOff, kOff, kOn, kAlone}));
}

TEST(withoutALeadOrInAShortPassNothingIsHeld) {
  LinkReservation reservation;
  reservation.addModel(0, fourSlices());
  const States nothing{kOff, kOff, kOff, kOff};
  CHECK(step(reservation, kStart) == nothing);
  CHECK(step(reservation, kStart + 1s) == nothing);
  reservation.retune(1min, kCredit); // longer than the time since the first step began
  CHECK(step(reservation, kStart + 2s) == nothing);
  CHECK(step(reservation, kStart + 3s) == nothing);
}

TEST(noReservationBeginsMoreThanTwoLeadsBefore) {
  LinkReservation reservation;
  reservation.addModel(0, fourSlices());
  reservation.retune(4ms, kCredit); // tensor 1 comes 10 ms before the first, and nothing between
  step(reservation, kStart);
  CHECK(step(reservation, kStart + 1s) == (States{kOff, kOff, kOff, kOff}));
  reservation.retune(6ms, kCredit);
  step(reservation, kStart + 2s);
  CHECK(step(reservation, kStart + 3s) == (States{kOff, kOff, kOn, kAlone}));
}

TEST(noReservationBeginsAfterTheFirstTensorOfAStep) {
  // Soon after the step before, the trigger is tensor 1; after a pause, the first one itself.
  for (const auto since : {Time::duration(50ms), Time::duration(1s)}) {
    LinkReservation reservation;
    reservation.addModel(0, fourSlices());
    reservation.retune(15ms, kCredit);
    step(reservation, kStart);
    // All gradients of a rank that has none: in the order of consumption.
    for (const TensorId tensor : {0U, 1U, 2U, 3U}) {
      CHECK(after(reservation, {0, tensor}, kStart + since) == kOff);
    }
  }
}

TEST(aSplitModelMakesNoReservation) {
  // Its first slice, the squares, is ready with a tensor only if that is the last to come.
  LinkReservation reservation;
  reservation.addModel(
      0, SliceLayout({{"a", kSize, 0}, {"b", kSize, 0}, {"c", kSize, 0}}, kSize, true, true));
  reservation.retune(15ms, kCredit);
  for (int number = 0; number < 3; ++number) {
    const Time start = kStart + number * 1s;
    for (const TensorId tensor : {2U, 1U, 0U}) {
      CHECK(
          after(reservation, {0, tensor}, {{0, 1 + tensor}}, start + (3 - tensor) * 10ms) == kOff);
    }
    CHECK(after(reservation, {0, 3}, {{0, 0}}, start + 40ms) == kOff);
    CHECK(!reservation.done({0, 0}));
  }
}

TEST(theReservationLastsUntilTheFirstSliceIsWhole) {
  LinkReservation reservation;
  // The first slice carries tensors 0 and 1, of one layer, whose hooks run in this order.
  const SliceLayout layout({{"a", 16, 0}, {"b", 16, 0}, {"c", 256, 0}, {"d", 256, 0}}, 256);
  CHECK_EQUAL(layout.tensorsOf(0).size(), 2U);
  reservation.addModel(0, layout);
  reservation.retune(25ms, kCredit);
  const auto pass = [&](Time start) {
    States states{
        after(reservation, {0, 3}, {{0, 2}}, start + 10ms),
        after(reservation, {0, 2}, {{0, 1}}, start + 20ms),
        after(reservation, {0, 0}, {}, start + 40ms),
        after(reservation, {0, 1}, {{0, 0}}, start + 42ms)};
    reservation.done({0, 0});
    return states;
  };
  CHECK(pass(kStart) == (States{kOff, kOff, kOff, kOff}));
  CHECK(pass(kStart + 1s) == (States{kOn, kOn, kOn, kAlone}));
}

TEST(theFirstSliceTravelsAloneUntilItHasArrived) {
  LinkReservation reservation = heldSince(kStart);
  CHECK(after(reservation, {0, 0}, kStart + 40ms) == kAlone);
  CHECK(!reservation.someoneWaits()); // for this very slice
  CHECK(!reservation.done({0, 1}));
  CHECK(!reservation.expire(reservation.until() - 1ns));
  CHECK(stateOf(reservation) == kAlone);
  CHECK(reservation.done({0, 0}));
  CHECK(stateOf(reservation) == kOff);
  CHECK(!reservation.expire(Time::max()));
}

TEST(theFirstSliceTravelsAloneForALeadAtMost) {
  LinkReservation reservation = heldSince(kStart);
  CHECK(after(reservation, {0, 0}, kStart + 40ms) == kAlone);
  CHECK(reservation.until() == kStart + 55ms);
  CHECK(reservation.expire(kStart + 55ms));
  CHECK(stateOf(reservation) == kOff);
  CHECK(!reservation.done({0, 0}));
}

TEST(aFirstSliceThatIsLargeItselfEndsTheReservation) {
  LinkReservation reservation = heldSince(kStart);
  reservation.retune(15ms, kCredit - 8);
  CHECK(reservation.ready({0, 0}, {{0, 0}}, kStart + 40ms));
  CHECK(stateOf(reservation) == kOff);
}

TEST(whoWaitsBeforeTheFirstSliceHasComeEndsTheReservation) {
  LinkReservation reservation = heldSince(kStart);
  CHECK(reservation.someoneWaits());
  CHECK(stateOf(reservation) == kOff);
  CHECK(!reservation.someoneWaits());
  CHECK(after(reservation, {0, 0}, kStart + 40ms) == kOff);
}

TEST(modelsDoNotHearEachOther) {
  LinkReservation reservation;
  reservation.addModel(0, fourSlices());
  reservation.addModel(1, fourSlices());
  reservation.retune(15ms, kCredit);
  step(reservation, kStart);
  CHECK(after(reservation, {1, 2}, kStart + 1s) == kOff);
  CHECK(after(reservation, {0, 2}, kStart + 1s) == kOn);
  CHECK(reservation.someoneWaits());
  reservation.removeModel(0);
  reservation.addModel(0, fourSlices());
  CHECK(after(reservation, {0, 2}, kStart + 2s) == kOff);
}

} // namespace hvd_order
