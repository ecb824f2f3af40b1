#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "world.h"

namespace hvd_order::checker {

/// What a real job did, in order of time: the timelines of all its ranks (record.py).
///
/// A file has one word for each event after the line that describes the job: `1r3` slice 3 became
/// ready on rank 1, `1i3` rank 1 issued it, `1d3` it was summed there.
struct Recording {
  struct Mark {
    Rank rank;
    char kind; // r, i or d
    SliceIndex slice;
  };
  Setup setup;
  std::vector<Mark> marks;
};

/// @throws InvalidUsage if the file is not a recording.
Recording readRecording(const std::string& path);

struct Replayed {
  bool same = false;         ///< the classes issued what the job did
  std::size_t reached = 0;   ///< marks replayed
  std::uint64_t tried = 0;   ///< events of the classes, those of dead ends among them
  std::size_t messages = 0;  ///< of the job as replayed
  std::size_t questions = 0; ///< empty ones among them
  std::optional<Violation> violation;
};

/// Lets the classes do what the job did.
Replayed replay(const Recording& recording);

} // namespace hvd_order::checker
