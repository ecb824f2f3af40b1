#include "engine/hold.h"

#include "check.h"

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Change = Hold::Change;
using Time = Hold::Clock::time_point;

constexpr Time kStart{1h};

/// A backward pass over tensors 3, 2, 1, 0, which are ready after 10, 20, 30 and 40 ms.
std::vector<Change> step(Hold& hold, Time start) {
  std::vector<Change> changes;
  for (const TensorId tensor : {3U, 2U, 1U, 0U}) {
    changes.push_back(hold.ready({0, tensor}, start + (4 - tensor) * 10ms));
  }
  return changes;
}

using Changes = std::vector<Change>;

} // namespace

TEST(theHoldBeginsOneLeadBeforeTheFirstTensor) {
  Hold hold;
  hold.addModel(0, 4);
  hold.setLead(15ms);
  const Change none = Change::kNone;
  CHECK(step(hold, kStart) == (Changes{none, none, none, Change::kEnd})); // nothing known yet
  // Tensor 1 comes 10 ms before the first, tensor 2 comes 20 ms before.
  CHECK(step(hold, kStart + 1s) == (Changes{none, Change::kBegin, none, Change::kEnd}));
  hold.setLead(10ms);
  CHECK(step(hold, kStart + 2s) == (Changes{none, Change::kBegin, none, Change::kEnd}));
  CHECK(step(hold, kStart + 3s) == (Changes{none, none, Change::kBegin, Change::kEnd}));
}

TEST(withoutALeadOrInAShortPassNothingIsHeld) {
  Hold hold;
  hold.addModel(0, 4);
  const Changes nothing{Change::kNone, Change::kNone, Change::kNone, Change::kEnd};
  CHECK(step(hold, kStart) == nothing);
  CHECK(step(hold, kStart + 1s) == nothing);
  hold.setLead(1min); // longer than the time since the first step began
  CHECK(step(hold, kStart + 2s) == nothing);
  CHECK(step(hold, kStart + 3s) == nothing);
}

TEST(noHoldBeginsAfterTheFirstTensorOfAStep) {
  Hold hold;
  hold.addModel(0, 4);
  hold.setLead(15ms);
  step(hold, kStart);
  // All gradients of a rank that has none: in the order of consumption.
  CHECK(hold.ready({0, 0}, kStart + 1s) == Change::kEnd);
  for (const TensorId tensor : {1U, 2U, 3U}) {
    CHECK(hold.ready({0, tensor}, kStart + 1s) == Change::kNone);
  }
}

TEST(modelsDoNotHearEachOther) {
  Hold hold;
  hold.addModel(0, 4);
  hold.addModel(1, 4);
  hold.setLead(15ms);
  step(hold, kStart);
  CHECK(hold.ready({1, 2}, kStart + 1s) == Change::kNone);
  CHECK(hold.ready({0, 2}, kStart + 1s) == Change::kBegin);
  hold.removeModel(0);
  hold.addModel(0, 4);
  CHECK(hold.ready({0, 2}, kStart + 2s) == Change::kNone);
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
