#include "engine/hold.h"

#include "check.h"

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Change = Hold::Change;
using Time = Hold::Clock::time_point;

constexpr Time kStart{1h};

/// Every tensor has a slice of its own.
Change ready(Hold& hold, TensorKey tensor, Time now) {
  return hold.ready(tensor, {{tensor.model, tensor.tensor}}, now);
}

/// A backward pass over tensors 3, 2, 1, 0, which are ready after 10, 20, 30 and 40 ms.
std::vector<Change> step(Hold& hold, Time start) {
  std::vector<Change> changes;
  for (const TensorId tensor : {3U, 2U, 1U, 0U}) {
    changes.push_back(ready(hold, {0, tensor}, start + (4 - tensor) * 10ms));
  }
  return changes;
}

using Changes = std::vector<Change>;

} // namespace

TEST(theHoldBeginsOneLeadBeforeTheFirstSlice) {
  Hold hold;
  hold.addModel(0, 4);
  hold.setLead(15ms);
  const Change none = Change::kNone;
  CHECK(step(hold, kStart) == (Changes{none, none, none, Change::kFirst})); // nothing known yet
  // Tensor 1 comes 10 ms before the first, tensor 2 comes 20 ms before.
  CHECK(step(hold, kStart + 1s) == (Changes{none, Change::kBegin, none, Change::kFirst}));
  hold.setLead(10ms);
  CHECK(step(hold, kStart + 2s) == (Changes{none, Change::kBegin, none, Change::kFirst}));
  CHECK(step(hold, kStart + 3s) == (Changes{none, none, Change::kBegin, Change::kFirst}));
}

TEST(withoutALeadOrInAShortPassNothingIsHeld) {
  Hold hold;
  hold.addModel(0, 4);
  const Changes nothing{Change::kNone, Change::kNone, Change::kNone, Change::kFirst};
  CHECK(step(hold, kStart) == nothing);
  CHECK(step(hold, kStart + 1s) == nothing);
  hold.setLead(1min); // longer than the time since the first step began
  CHECK(step(hold, kStart + 2s) == nothing);
  CHECK(step(hold, kStart + 3s) == nothing);
}

TEST(noHoldLastsMoreThanTwoLeads) {
  Hold hold;
  hold.addModel(0, 4);
  hold.setLead(4ms); // tensor 1 comes 10 ms before the first, and nothing between
  step(hold, kStart);
  const Change none = Change::kNone;
  CHECK(step(hold, kStart + 1s) == (Changes{none, none, none, Change::kFirst}));
  hold.setLead(6ms);
  step(hold, kStart + 2s);
  CHECK(step(hold, kStart + 3s) == (Changes{none, none, Change::kBegin, Change::kFirst}));
}

TEST(noHoldBeginsAfterTheFirstTensorOfAStep) {
  Hold hold;
  hold.addModel(0, 4);
  hold.setLead(15ms);
  step(hold, kStart);
  // All gradients of a rank that has none: in the order of consumption.
  CHECK(ready(hold, {0, 0}, kStart + 1s) == Change::kFirst);
  for (const TensorId tensor : {1U, 2U, 3U}) {
    CHECK(ready(hold, {0, tensor}, kStart + 1s) == Change::kNone);
  }
}

TEST(theHoldLastsUntilTheFirstSliceIsWhole) {
  Hold hold;
  hold.addModel(0, 4);
  hold.setLead(25ms);
  // The first slice carries tensors 0 and 1, of one layer, whose hooks run in this order.
  const auto pass = [&](Time start) {
    return Changes{
        hold.ready({0, 3}, {{0, 2}}, start + 10ms), hold.ready({0, 2}, {{0, 1}}, start + 20ms),
        hold.ready({0, 0}, {}, start + 40ms), hold.ready({0, 1}, {{0, 0}}, start + 42ms)};
  };
  const Change none = Change::kNone;
  CHECK(pass(kStart) == (Changes{none, none, none, Change::kFirst}));
  CHECK(pass(kStart + 1s) == (Changes{Change::kBegin, none, none, Change::kFirst}));
}

TEST(modelsDoNotHearEachOther) {
  Hold hold;
  hold.addModel(0, 4);
  hold.addModel(1, 4);
  hold.setLead(15ms);
  step(hold, kStart);
  CHECK(ready(hold, {1, 2}, kStart + 1s) == Change::kNone);
  CHECK(ready(hold, {0, 2}, kStart + 1s) == Change::kBegin);
  hold.removeModel(0);
  hold.addModel(0, 4);
  CHECK(ready(hold, {0, 2}, kStart + 2s) == Change::kNone);
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
