#include "torch/gradients/gradient_phase.h"

#include <initializer_list>

#include "check.h"

namespace hvd_order {

namespace {

using enum GradientEvent;

/// Whether each event of a step can follow the one before, from WAITING back to it.
constexpr bool isStep(std::initializer_list<GradientEvent> events) {
  GradientPhase phase = GradientPhase::WAITING;
  for (const GradientEvent event : events) {
    const auto next = nextPhase(phase, event);
    if (!next) {
      return false;
    }
    phase = *next;
  }
  return phase == GradientPhase::WAITING;
}

} // namespace

TEST(aStepEndsWhereItBegan) {
  CHECK(isStep({SEND, SUM, BEGIN}));                // updated at once
  CHECK(isStep({SEND, DEFER, SUM, UPDATE, BEGIN})); // by its reader
  CHECK(isStep({SEND, SUM, DEFER, UPDATE, BEGIN})); // read before step(), then by its reader
  CHECK(isStep({BEGIN}));                           // nothing was sent
  CHECK(isStep({SEND, SEND, SUM, BEGIN}));          // given up
}

TEST(noGradientIsLostOrUsedEarly) {
  CHECK(!isStep({SEND, BEGIN}));                    // its sum would arrive in the next step
  CHECK(!isStep({SEND, DEFER, UPDATE, BEGIN}));     // an update before its sum
  CHECK(!isStep({SEND, DEFER, SUM, BEGIN}));        // an update that never happens
  CHECK(!isStep({SEND, SUM, SUM, BEGIN}));          // counted twice
  CHECK(!isStep({SEND, SUM, SEND, SUM, BEGIN}));    // sent twice
  CHECK(!isStep({SEND, DEFER, SEND, SUM, UPDATE})); // sent again before its update
  CHECK(!isStep({DEFER, SUM, UPDATE, BEGIN}));      // an update without a gradient
}

} // namespace hvd_order
