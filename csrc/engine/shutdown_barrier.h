#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/types.h"
#include "engine/health.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Finds out when a rank may leave without harm to the other ranks: once every rank has finished
/// as many slices as the leaving rank. All ranks finish the same slices, so then no rank waits for
/// its bytes. Pure; the engine carries its messages and calls it under the engine's lock.
///
/// A rank that wants to leave tells rank 0. Rank 0 asks all ranks, and informs the ranks that may
/// leave. The engines do this without any action of the programs.
class ShutdownBarrier final {
 public:
  using Addressed = Health::Addressed;

  ShutdownBarrier(Rank rank, int size);

  // Each of these methods returns the messages to send.

  /// This rank wants to leave, with the slices that it has finished by now.
  std::vector<Addressed> begin();
  /// A slice is finished on this rank.
  std::vector<Addressed> sliceDone();
  /// Handles kBarrier, kFinished and kMissing.
  std::vector<Addressed> received(Rank from, const ControlMessage& message);
  /// A rank has left or is lost; no rank waits for it any more.
  std::vector<Addressed> gone(Rank rank);
  /// Asks rank 0 which ranks this rank waits for; the answer is in `missing`.
  std::vector<Addressed> ask();

  [[nodiscard]] bool mayLeave() const {
    return mayLeave_;
  }
  /// The ranks that this rank waits for, as last reported; rank 0 until its first answer.
  [[nodiscard]] const std::vector<Rank>& missing() const {
    return missing_;
  }
  [[nodiscard]] bool isAnswered() const {
    return answered_;
  }

 private:
  struct Leaver {
    std::uint64_t count; // slices that it has finished
    bool told;           // that it may leave
  };

  std::vector<Addressed> letGo();
  [[nodiscard]] std::vector<Rank> lacking(std::uint64_t count) const;

  const Rank rank_;
  const int size_;
  std::uint64_t done_ = 0;   // slices finished here
  std::uint64_t wanted_ = 0; // done_ to report to rank 0 when reached; 0: none
  bool mayLeave_ = false;
  std::vector<Rank> missing_{0};
  bool answered_ = false;

  // On rank 0 only.
  std::vector<std::uint64_t> finished_; // by rank, as last reported
  std::uint64_t asked_ = 0;             // the largest count that rank 0 has asked for
  std::map<Rank, Leaver> leaving_;
  std::set<Rank> gone_;
};

} // namespace hvd_order
