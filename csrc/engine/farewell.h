#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/types.h"
#include "engine/health.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Finds out when a rank may leave without the others losing anything: once every rank has finished
/// as many slices as it has. All ranks finish the same slices, so then nobody waits for a byte of
/// this rank. Pure; the engine carries its messages and calls it under its lock.
///
/// A rank that wants to leave tells rank 0, rank 0 asks all ranks, and tells those that may go. No
/// rank has to do anything but let its engine run, whatever its program is busy with.
class Farewell final {
 public:
  using Addressed = Health::Addressed;

  Farewell(Rank rank, int size);

  // Each returns the messages to send.

  /// This rank wants to leave, with what it has finished by now.
  std::vector<Addressed> begin();
  /// A slice is finished on this rank.
  std::vector<Addressed> sliceDone();
  /// Handles kFarewell, kFinished and kMissing.
  std::vector<Addressed> received(Rank from, const ControlMessage& message);
  /// A rank has left or is lost; nobody waits for it any more.
  std::vector<Addressed> gone(Rank rank);
  /// Asks rank 0 for whom this rank waits; the answer is `missing`.
  std::vector<Addressed> ask();

  [[nodiscard]] bool mayLeave() const {
    return mayLeave_;
  }
  /// For whom this rank waits, as far as it knows; rank 0 until that has answered.
  [[nodiscard]] const std::vector<Rank>& missing() const {
    return missing_;
  }
  [[nodiscard]] bool isAnswered() const {
    return answered_;
  }

 private:
  struct Leaver {
    std::uint64_t count; // slices that it has finished
    bool told;           // that it may go
  };

  std::vector<Addressed> settle();
  [[nodiscard]] std::vector<Rank> lacking(std::uint64_t count) const;

  const Rank rank_;
  const int size_;
  std::uint64_t done_ = 0;   // slices finished here
  std::uint64_t wanted_ = 0; // rank 0 wants to hear when there are so many; 0: it does not
  bool mayLeave_ = false;
  std::vector<Rank> missing_{0};
  bool answered_ = false;

  // On rank 0 only.
  std::vector<std::uint64_t> finished_; // by rank, as it has said
  std::uint64_t asked_ = 0;             // the largest count that was asked for
  std::map<Rank, Leaver> leaving_;
  std::set<Rank> gone_;
};

} // namespace hvd_order
