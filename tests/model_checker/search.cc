#include "search.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "reduction.h"
#include "visited.h"

// Depth-first search with a set of fingerprints, and a breadth-first search for short traces.
//
// Every event uses up something: a tensor that is to become ready, a message, a slice in flight. So
// the graph of states has no cycles, every path ends, and both searches end.
//
// The audit compares, for each state, the fingerprints of its successors with those found when the
// state was met first. If two histories lead to equal words but different futures, a member is
// missing in appendState, and the search has not seen all. It needs all successors, hence no
// reduction.

namespace hvd_order::checker {

namespace {

struct Frame {
  World world;
  std::vector<Event> events;
  std::size_t next = 0;
};

class DepthFirst final {
 public:
  DepthFirst(const Setup& setup, const SearchOptions& options)
      : options_(options), layouts_(layoutsOf(setup)), setup_(setup), reduction_(setup, layouts_) {}

  SearchResult run() {
    while (!explore()) { // a pair of ranks exchanges messages that the reduction did not know of
    }
    return std::move(result_);
  }

 private:
  /// @return whether the exploration was valid to the end.
  bool explore() {
    result_ = {};
    visited_ = {};
    stack_.clear();
    arrive(World(setup_, layouts_));
    while (!stack_.empty() && !result_.violation && result_.complete) {
      Frame& frame = stack_.back();
      if (frame.next == frame.events.size()) {
        stack_.pop_back();
        continue;
      }
      World world = frame.world;
      const Event event = frame.events[frame.next++];
      result_.violation = world.apply(event);
      ++result_.events;
      result_.questions += static_cast<std::uint64_t>(std::ranges::count_if(
          world.decisions().messages, [](const SliceMessage& m) { return m.slices.empty(); }));
      if (options_.reduced && reduction_.learn(event.rank, world.decisions())) {
        return false;
      }
      if (!result_.violation) {
        arrive(std::move(world));
      }
    }
    for (const Frame& frame : stack_) {
      if (result_.violation && frame.next > 0) {
        result_.trace.push_back(frame.events[frame.next - 1]);
      }
    }
    result_.states = visited_.size();
    return true;
  }

  void arrive(World world) {
    const std::uint64_t fingerprint = world.fingerprint();
    const bool isNew = visited_.insert(fingerprint);
    if (options_.audit && !hasKnownFuture(world, fingerprint)) {
      result_.violation = {"state", "an equal state had other futures: appendState lacks a member"};
      return;
    }
    if (!isNew) {
      return;
    }
    std::vector<Event> events = world.events();
    if (events.empty()) {
      ++result_.ends;
      result_.violation = world.checkEnd();
      return;
    }
    if (options_.reduced) {
      events = reduction_.choose(world, std::move(events));
    }
    result_.complete = visited_.size() < options_.mostStates;
    stack_.push_back({std::move(world), std::move(events)});
  }

  bool hasKnownFuture(const World& world, std::uint64_t fingerprint) {
    std::uint64_t future = 0;
    for (const Event& event : world.events()) {
      World next = world;
      const bool broken = next.apply(event).has_value();
      future += broken ? 1 : next.fingerprint(); // a sum: the order of events does not matter
    }
    return futures_.try_emplace(fingerprint, future).first->second == future;
  }

  const SearchOptions options_;
  const Layouts layouts_;
  const Setup& setup_;
  Reduction reduction_;
  Visited visited_;
  std::unordered_map<std::uint64_t, std::uint64_t> futures_; // by fingerprint; for the audit
  std::vector<Frame> stack_;
  SearchResult result_;
};

/// How a state was reached: an event after an earlier step.
struct Step {
  std::size_t before;
  Event event;
};

std::vector<Event> traceTo(const std::vector<Step>& steps, std::size_t last) {
  std::vector<Event> trace;
  for (std::size_t at = last; at != 0; at = steps[at].before) {
    trace.push_back(steps[at].event);
  }
  std::ranges::reverse(trace);
  return trace;
}

} // namespace

SearchResult search(const Setup& setup, const SearchOptions& options) {
  return DepthFirst(setup, options).run();
}

SearchResult searchShortest(const Setup& setup, std::uint64_t mostStates) {
  const Layouts layouts = layoutsOf(setup);
  SearchResult result;
  Visited visited;
  std::vector<Step> steps{{}}; // the first is the beginning
  std::vector<std::pair<World, std::size_t>> layer;
  layer.emplace_back(World(setup, layouts), 0);
  while (!layer.empty() && result.complete) {
    std::vector<std::pair<World, std::size_t>> nextLayer;
    for (const auto& [world, at] : layer) {
      const std::vector<Event> events = world.events();
      result.ends += events.empty() ? 1 : 0;
      result.violation = events.empty() ? world.checkEnd() : std::nullopt;
      for (std::size_t i = 0; i < events.size() && !result.violation; ++i) {
        World next = world;
        ++result.events;
        result.violation = next.apply(events[i]);
        if (!result.violation && !visited.insert(next.fingerprint())) {
          continue;
        }
        steps.push_back({at, events[i]});
        nextLayer.emplace_back(std::move(next), steps.size() - 1);
      }
      if (result.violation) {
        result.trace = traceTo(steps, events.empty() ? at : steps.size() - 1);
        result.states = visited.size();
        return result;
      }
    }
    layer = std::move(nextLayer);
    result.complete = visited.size() < mostStates;
  }
  result.states = visited.size();
  return result;
}

} // namespace hvd_order::checker
