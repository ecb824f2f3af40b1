#include "planning/network/flows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "base/error.h"

// Fluid model of a network: a flow has a rate, not packets.
//
// Between two events, all rates are constant. So the state is the work that each flow has left at
// time `lastS_`. Every start and every end of a flow advances the flows to that moment (`carry`)
// and computes all rates anew (`share`), which also yields the flow that ends next.
//
// `share` is progressive filling. It picks the link that gives each of its unassigned flows the
// least, fixes these flows at that rate, subtracts them from their other links, and repeats until
// every flow has a rate. A flow of weight w on a link takes w times its rate there.
//
// Invariants: on no link do the flows exceed the capacity, and each flow has a link that is full
// and on which no flow is faster, which is max-min fairness. Simultaneous ends are taken in order
// of start, so results are reproducible.
//
// Source: Bertsekas and Gallager, Data Networks, section 6.5.2.

namespace hvd_order::simulate {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

} // namespace

Flows::Flows(const std::vector<double>& capacities) : nextEndS_(kNever), busy_(capacities.size()) {
  for (const double capacity : capacities) {
    HVDO_CHECK(std::isfinite(capacity) && capacity > 0, "a link of capacity ", capacity);
    state_.push_back({.capacity = capacity});
  }
}

void Flows::start(double nowS, Id id, double work, Use first) {
  add(nowS, {id, 1, {first, first}, work, 0});
}

void Flows::start(double nowS, Id id, double work, Use first, Use second) {
  add(nowS, {id, 2, {first, second}, work, 0});
}

void Flows::add(double nowS, const Flow& flow) {
  carry(nowS);
  for (const Use& use : std::span(flow.use, flow.uses)) {
    LinkState& link = state_[use.link];
    if (link.flows++ == 0) {
      link.sinceS = nowS;
    }
  }
  flows_.push_back(flow);
  share();
}

Flows::Id Flows::finish() {
  const double nowS = nextEndS_;
  carry(nowS);
  const Flow flow = flows_[next_];
  flows_.erase(flows_.begin() + static_cast<std::ptrdiff_t>(next_));
  for (const Use& use : std::span(flow.use, flow.uses)) {
    LinkState& link = state_[use.link];
    if (--link.flows > 0) {
      continue;
    }
    link.busyS += nowS - link.sinceS;
    if (recording_) {
      std::vector<Interval>& busy = busy_[use.link];
      if (!busy.empty() && busy.back().endS == link.sinceS) {
        busy.back().endS = nowS;
      } else {
        busy.push_back({link.sinceS, nowS});
      }
    }
  }
  share();
  return flow.id;
}

void Flows::startRecording() {
  recording_ = true;
}

void Flows::carry(double untilS) {
  for (Flow& flow : flows_) {
    flow.left = std::max(flow.left - flow.rate * (untilS - lastS_), 0.0);
  }
  lastS_ = untilS;
}

// Progressive filling: the link with the smallest share per flow gives each of its flows that
// share. The other flows share the remaining capacity of the other links in the same way.
void Flows::share() {
  nextEndS_ = kNever;
  for (Flow& flow : flows_) {
    flow.rate = 0;
    for (const Use& use : std::span(flow.use, flow.uses)) {
      state_[use.link].spare = state_[use.link].capacity;
      state_[use.link].weight = 0;
    }
  }
  for (const Flow& flow : flows_) {
    for (const Use& use : std::span(flow.use, flow.uses)) {
      state_[use.link].weight += use.weight;
    }
  }
  for (std::size_t toGo = flows_.size(); toGo > 0;) {
    double least = kNever;
    Link narrowest = 0;
    for (const Flow& flow : flows_) {
      for (const Use& use : std::span(flow.use, flow.uses)) {
        const double part = state_[use.link].spare / state_[use.link].weight;
        if (flow.rate == 0 && part < least) {
          least = part;
          narrowest = use.link;
        }
      }
    }
    HVDO_CHECK(least > 0 && least < kNever, "links give flows ", least);
    for (std::size_t i = 0; i < flows_.size(); ++i) {
      Flow& flow = flows_[i];
      const auto uses = std::span(flow.use, flow.uses);
      const bool there = std::any_of(
          uses.begin(), uses.end(), [&](const Use& use) { return use.link == narrowest; });
      if (flow.rate != 0 || !there) {
        continue;
      }
      flow.rate = least;
      --toGo;
      for (const Use& use : uses) {
        LinkState& link = state_[use.link];
        link.spare -= least * use.weight;
        link.weight -= use.weight;
      }
      const double endS = lastS_ + flow.left / flow.rate;
      if (endS < nextEndS_ || (endS == nextEndS_ && i < next_)) {
        nextEndS_ = endS;
        next_ = i;
      }
    }
  }
}

} // namespace hvd_order::simulate
