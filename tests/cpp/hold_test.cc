#include "engine/hold.h"

#include "check.h"

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Time = Hold::Clock::time_point;

constexpr Time kStart{1h};
constexpr ByteCount kSize = 64;
constexpr ByteCount kCredit = 8 * kSize; // of which a slice may have an eighth during a hold

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

State stateOf(const Hold& hold) {
  const bool expires = hold.until() != Time::max();
  if (hold.largestBytes() == Scheduler::kAnySize) {
    CHECK(!expires);
    return State::kOff;
  }
  CHECK_EQUAL(hold.largestBytes(), kSize);
  return expires ? State::kAlone : State::kOn;
}

State after(Hold& hold, TensorKey tensor, const std::vector<SliceKey>& slices, Time now) {
  const State before = stateOf(hold);
  const bool changed = hold.ready(tensor, slices, now);
  CHECK_EQUAL(changed, stateOf(hold) != before);
  return stateOf(hold);
}

/// Where every tensor has a slice of its own.
State after(Hold& hold, TensorKey tensor, Time now) {
  return after(hold, tensor, {{tensor.model, tensor.tensor}}, now);
}

/// A backward pass over tensors 3, 2, 1, 0, which are ready after 10, 20, 30 and 40 ms. The first
/// slice arrives at once.
States step(Hold& hold, Time start) {
  States states;
  for (const TensorId tensor : {3U, 2U, 1U, 0U}) {
    states.push_back(after(hold, {0, tensor}, start + (4 - tensor) * 10ms));
  }
  CHECK_EQUAL(hold.done({0, 0}), states.back() == State::kAlone);
  CHECK(stateOf(hold) == State::kOff);
  return states;
}

/// Has seen a step, holds with a lead of 15 ms, and is now before the first slice of the next one.
Hold heldSince(Time start) {
  Hold hold;
  hold.addModel(0, fourSlices());
  hold.retune(15ms, kCredit);
  step(hold, start - 1s);
  CHECK(after(hold, {0, 2}, start + 20ms) == State::kOn);
  CHECK(after(hold, {0, 1}, start + 30ms) == State::kOn);
  return hold;
}

constexpr State kOff = State::kOff;
constexpr State kOn = State::kOn;
constexpr State kAlone = State::kAlone;

} // namespace

TEST(theHoldBeginsOneLeadBeforeTheFirstSlice) {
  Hold hold;
  hold.addModel(0, fourSlices());
  hold.retune(15ms, kCredit);
  CHECK(step(hold, kStart) == (States{kOff, kOff, kOff, kOff})); // nothing known yet
  // Tensor 1 comes 10 ms before the first, tensor 2 comes 20 ms before.
  CHECK(step(hold, kStart + 1s) == (States{kOff, kOn, kOn, kAlone}));
  hold.retune(10ms, kCredit);
  CHECK(step(hold, kStart + 2s) == (States{kOff, kOn, kOn, kAlone}));
  CHECK(step(hold, kStart + 3s) == (States{kOff, kOff, kOn, kAlone}));
}

TEST(withoutALeadOrInAShortPassNothingIsHeld) {
  Hold hold;
  hold.addModel(0, fourSlices());
  const States nothing{kOff, kOff, kOff, kOff};
  CHECK(step(hold, kStart) == nothing);
  CHECK(step(hold, kStart + 1s) == nothing);
  hold.retune(1min, kCredit); // longer than the time since the first step began
  CHECK(step(hold, kStart + 2s) == nothing);
  CHECK(step(hold, kStart + 3s) == nothing);
}

TEST(noHoldBeginsMoreThanTwoLeadsBefore) {
  Hold hold;
  hold.addModel(0, fourSlices());
  hold.retune(4ms, kCredit); // tensor 1 comes 10 ms before the first, and nothing between
  step(hold, kStart);
  CHECK(step(hold, kStart + 1s) == (States{kOff, kOff, kOff, kOff}));
  hold.retune(6ms, kCredit);
  step(hold, kStart + 2s);
  CHECK(step(hold, kStart + 3s) == (States{kOff, kOff, kOn, kAlone}));
}

TEST(noHoldBeginsAfterTheFirstTensorOfAStep) {
  Hold hold;
  hold.addModel(0, fourSlices());
  hold.retune(15ms, kCredit);
  step(hold, kStart);
  // All gradients of a rank that has none: in the order of consumption.
  for (const TensorId tensor : {0U, 1U, 2U, 3U}) {
    CHECK(after(hold, {0, tensor}, kStart + 1s) == kOff);
  }
}

TEST(theHoldLastsUntilTheFirstSliceIsWhole) {
  Hold hold;
  // The first slice carries tensors 0 and 1, of one layer, whose hooks run in this order.
  const SliceLayout layout({{"a", 16, 0}, {"b", 16, 0}, {"c", 256, 0}, {"d", 256, 0}}, 256);
  CHECK_EQUAL(layout.tensorsOf(0).size(), 2U);
  hold.addModel(0, layout);
  hold.retune(25ms, kCredit);
  const auto pass = [&](Time start) {
    States states{
        after(hold, {0, 3}, {{0, 2}}, start + 10ms), after(hold, {0, 2}, {{0, 1}}, start + 20ms),
        after(hold, {0, 0}, {}, start + 40ms), after(hold, {0, 1}, {{0, 0}}, start + 42ms)};
    hold.done({0, 0});
    return states;
  };
  CHECK(pass(kStart) == (States{kOff, kOff, kOff, kOff}));
  CHECK(pass(kStart + 1s) == (States{kOn, kOn, kOn, kAlone}));
}

TEST(theFirstSliceTravelsAloneUntilItHasArrived) {
  Hold hold = heldSince(kStart);
  CHECK(after(hold, {0, 0}, kStart + 40ms) == kAlone);
  CHECK(!hold.someoneWaits()); // for this very slice
  CHECK(!hold.done({0, 1}));
  CHECK(!hold.expire(hold.until() - 1ns));
  CHECK(stateOf(hold) == kAlone);
  CHECK(hold.done({0, 0}));
  CHECK(stateOf(hold) == kOff);
  CHECK(!hold.expire(Time::max()));
}

TEST(theFirstSliceTravelsAloneForALeadAtMost) {
  Hold hold = heldSince(kStart);
  CHECK(after(hold, {0, 0}, kStart + 40ms) == kAlone);
  CHECK(hold.until() == kStart + 55ms);
  CHECK(hold.expire(kStart + 55ms));
  CHECK(stateOf(hold) == kOff);
  CHECK(!hold.done({0, 0}));
}

TEST(aFirstSliceThatIsLargeItselfEndsTheHold) {
  Hold hold = heldSince(kStart);
  hold.retune(15ms, kCredit - 8);
  CHECK(hold.ready({0, 0}, {{0, 0}}, kStart + 40ms));
  CHECK(stateOf(hold) == kOff);
}

TEST(whoWaitsBeforeTheFirstSliceHasComeEndsTheHold) {
  Hold hold = heldSince(kStart);
  CHECK(hold.someoneWaits());
  CHECK(stateOf(hold) == kOff);
  CHECK(!hold.someoneWaits());
  CHECK(after(hold, {0, 0}, kStart + 40ms) == kOff);
}

TEST(modelsDoNotHearEachOther) {
  Hold hold;
  hold.addModel(0, fourSlices());
  hold.addModel(1, fourSlices());
  hold.retune(15ms, kCredit);
  step(hold, kStart);
  CHECK(after(hold, {1, 2}, kStart + 1s) == kOff);
  CHECK(after(hold, {0, 2}, kStart + 1s) == kOn);
  CHECK(hold.someoneWaits());
  hold.removeModel(0);
  hold.addModel(0, fourSlices());
  CHECK(after(hold, {0, 2}, kStart + 2s) == kOff);
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
