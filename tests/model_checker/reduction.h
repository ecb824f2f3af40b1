#pragma once

#include <bitset>
#include <vector>

#include "world.h"

namespace hvd_order::checker {

/// Which of the enabled events suffice to reach every end and every broken property.
///
/// Events on different ranks can change places, so not every interleaving need be explored. A set
/// of ranks is *closed* if no event on a rank outside can enable a further event on a rank inside.
/// Then whatever happens outside first, the enabled events inside can happen before it as well, so
/// exploring those alone loses no end and no broken property (persistent sets: Godefroid 1996;
/// closures: Valmari 1990). No state is reached twice on one path, so nothing is postponed forever.
///
/// Which rank sends to which is learned: `Reduction` starts with a guess from random runs, and
/// `learn` reports a pair that was missing, whereupon the search starts again.
class Reduction final {
 public:
  explicit Reduction(const Setup& setup, const Layouts& layouts);

  /// @return the events of the smallest closed set of ranks that has one.
  [[nodiscard]] std::vector<Event> choose(const World& world, std::vector<Event> enabled) const;
  /// Notes who sends to whom. @return whether that was new.
  bool learn(Rank from, const Decisions& decisions);

 private:
  using Ranks = std::bitset<kMaxRanks>;

  [[nodiscard]] Ranks closure(const World& world, Rank seed) const;
  void addNeeded(const World& world, Rank rank, Ranks& ranks) const;
  [[nodiscard]] bool sends(Rank from, Rank to) const {
    return sends_[static_cast<std::size_t>(from * kMaxRanks + to)];
  }

  bool on_; // a lagging rank's events depend on all ranks, so nothing can change places
  std::bitset<kMaxRanks * kMaxRanks> sends_;
};

} // namespace hvd_order::checker
