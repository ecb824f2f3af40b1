#include "planning/network/flows.h"

#include <algorithm>

// Fluid model of a link: a flow has a rate, not packets. Between two events all rates are constant
// and equal. So the state is the work that each flow has left at time `lastS_`; every start and
// every end advances the flows to that moment (`carry`) and finds the one that ends next.
//
// Simultaneous ends are taken in order of start, so results are reproducible.

namespace hvd_order::simulate {

void Flows::start(double nowS, Id id, double work) {
  carry(nowS);
  if (flows_.empty()) {
    sinceS_ = nowS;
  }
  flows_.push_back({id, work});
  findNext();
}

Flows::Id Flows::finish() {
  const double nowS = nextEndS_;
  carry(nowS);
  const Id id = flows_[next_].id;
  flows_.erase(flows_.begin() + static_cast<std::ptrdiff_t>(next_));
  if (flows_.empty()) {
    busyS_ += nowS - sinceS_;
    if (recording_) {
      if (!busy_.empty() && busy_.back().endS == sinceS_) {
        busy_.back().endS = nowS;
      } else {
        busy_.push_back({sinceS_, nowS});
      }
    }
  }
  findNext();
  return id;
}

void Flows::carry(double untilS) {
  const double rate = 1.0 / static_cast<double>(flows_.size());
  for (Flow& flow : flows_) {
    flow.left = std::max(flow.left - rate * (untilS - lastS_), 0.0);
  }
  lastS_ = untilS;
}

void Flows::findNext() {
  nextEndS_ = std::numeric_limits<double>::infinity();
  const double rate = 1.0 / static_cast<double>(flows_.size());
  for (std::size_t i = 0; i < flows_.size(); ++i) {
    const double endS = lastS_ + flows_[i].left / rate;
    if (endS < nextEndS_) {
      nextEndS_ = endS;
      next_ = i;
    }
  }
}

} // namespace hvd_order::simulate
