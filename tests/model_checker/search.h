#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "world.h"

namespace hvd_order::checker {

/// How a setup is explored.
struct SearchOptions {
  /// Explore one order of events that can change places, instead of all.
  bool reduced = true;
  /// Whenever a state is met again, compare its futures with those seen first. A member that
  /// appendState forgets shows here.
  bool audit = false;
  std::uint64_t mostStates = 100'000'000;
};

struct SearchResult {
  std::uint64_t states = 0;
  std::uint64_t events = 0;
  std::uint64_t ends = 0;      ///< states in which nothing can happen any more
  std::uint64_t questions = 0; ///< empty messages sent: a rank asks to be heard, or is answered
  bool complete = true;        ///< false: stopped at `mostStates`
  std::optional<Violation> violation;
  std::vector<Event> trace; ///< to the violation
};

/// Explores every state, depth first, until a property is broken.
SearchResult search(const Setup& setup, const SearchOptions& options);

/// Explores breadth first without reduction: the trace is a shortest one.
SearchResult searchShortest(const Setup& setup, std::uint64_t mostStates);

} // namespace hvd_order::checker
