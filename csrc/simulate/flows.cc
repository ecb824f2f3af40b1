#include "simulate/flows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "base/error.h"

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
    State& link = state_[use.link];
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
    State& link = state_[use.link];
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

// Progressive filling: the link that gives its flows least gives each of them its equal part; what
// these leave free elsewhere is shared by the others in the same way.
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
        State& link = state_[use.link];
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
