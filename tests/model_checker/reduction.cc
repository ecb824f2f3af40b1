#include "reduction.h"

#include <algorithm>
#include <random>

// Closes sets of ranks. An event on rank r that cannot happen yet waits for one of three things:
// - a message from a rank of which none is under way: that rank joins the set, if it ever sends to
// r;
// - the place where a plan ends: the ranks that have not held it join the set;
// - the end of a slice that some ranks have not issued: one of these ranks joins the set, because
//   the slice cannot end before that rank has moved.
// Everything else that r waits for are events on r.

namespace hvd_order::checker {

namespace {

constexpr int kGuesses = 200; // random runs

} // namespace

Reduction::Reduction(const Setup& setup, const Layouts& layouts) : on_(!setup.lags) {
  std::mt19937 random(1);
  for (int run = 0; on_ && run < kGuesses; ++run) {
    World world(setup, layouts);
    for (std::vector<Event> events = world.events(); !events.empty(); events = world.events()) {
      const Event event = events[random() % events.size()];
      if (world.apply(event)) {
        break; // the search finds it too
      }
      learn(event.rank, world.decisions());
    }
  }
}

bool Reduction::learn(Rank from, const Decisions& decisions) {
  const auto before = sends_;
  for (const SliceMessage& message : decisions.messages) {
    sends_.set(static_cast<std::size_t>(from * kMaxRanks + message.to));
  }
  return on_ && sends_ != before;
}

std::vector<Event> Reduction::choose(const World& world, std::vector<Event> enabled) const {
  if (!on_ || enabled.empty()) {
    return enabled;
  }
  Ranks best;
  std::ptrdiff_t fewest = static_cast<std::ptrdiff_t>(enabled.size()) + 1;
  for (Rank seed = 0; seed < world.setup().ranks; ++seed) {
    const Ranks ranks = closure(world, seed);
    const auto events = std::ranges::count_if(enabled, [&](const Event& event) {
      return ranks.test(static_cast<std::size_t>(event.rank));
    });
    if (events > 0 && events < fewest) {
      fewest = events;
      best = ranks;
    }
  }
  std::erase_if(enabled, [&](const Event& event) {
    return !best.test(static_cast<std::size_t>(event.rank));
  });
  return enabled;
}

Reduction::Ranks Reduction::closure(const World& world, Rank seed) const {
  Ranks ranks;
  ranks.set(static_cast<std::size_t>(seed));
  Ranks before;
  while (ranks != before) {
    before = ranks;
    for (Rank rank = 0; rank < world.setup().ranks; ++rank) {
      if (ranks.test(static_cast<std::size_t>(rank))) {
        addNeeded(world, rank, ranks);
      }
    }
  }
  return ranks;
}

void Reduction::addNeeded(const World& world, Rank rank, Ranks& ranks) const {
  if (world.node(rank).dead) {
    return;
  }
  for (Rank from = 0; from < world.setup().ranks; ++from) {
    if (sends(from, rank) && !world.node(from).dead && !world.underWay(from, rank)) {
      ranks.set(static_cast<std::size_t>(from));
    }
  }
  for (Rank other = 0; world.setup().leavesPlan && other < world.setup().ranks; ++other) {
    if (!world.node(other).held) {
      ranks.set(static_cast<std::size_t>(other)); // the plan cannot end before it has held
    }
  }
  for (const Node::InFlight& slice : world.node(rank).inFlight) {
    Ranks missing;       // have not issued the slice
    std::size_t one = 0; // of them
    bool never = false;
    for (Rank other = 0; other < world.setup().ranks; ++other) {
      const bool misses = world.node(other).issued <= slice.place;
      missing.set(static_cast<std::size_t>(other), misses);
      one = misses ? static_cast<std::size_t>(other) : one;
      never = never || (misses && world.node(other).dead);
    }
    if (missing.any() && !never && (missing & ranks).none()) {
      ranks.set(one); // the slice cannot end before this rank has moved
    }
  }
}

} // namespace hvd_order::checker
