#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "scheduler/scheduler.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Finds the cause of a stall: asks all ranks whether they have the gradients that this rank waits
/// for. Pure; the engine carries its messages and calls it under the engine's lock.
///
/// Rank 0 relays the messages: a query reaches every rank, each rank answers with the gradients
/// that it lacks, and the answers go back to the rank that asked.
class Health final {
 public:
  struct Addressed {
    Rank to;
    ControlMessage message;
  };

  Health(Rank rank, int size) : rank_(rank), size_(size) {}

  /// Starts a new inquiry; answers to older inquiries no longer count.
  /// @param waiting the tensors whose exchange is under way on this rank.
  /// @param head the slice agreed to be sent next; this rank itself may lack it.
  /// @return the messages to send.
  std::vector<Addressed> ask(
      const Scheduler& scheduler,
      std::vector<TensorKey> waiting,
      std::optional<SliceKey> head = std::nullopt);

  /// Handles kQuery, kReply and kActivity. @return the messages to send.
  /// @param activity what this rank waits in; empty if nothing is known.
  std::vector<Addressed> received(
      const Scheduler& scheduler,
      Rank from,
      const ControlMessage& message,
      const std::string& activity = {});

  /// Returns one line about the results so far: the tensors that are missing, the ranks that lack
  /// them, what other ranks wait in, and the ranks that did not answer.
  [[nodiscard]] std::string report(const Scheduler& scheduler) const;

 private:
  struct Missing {
    TensorKey tensor;
    std::set<Rank> ranks;
  };

  void note(TensorKey tensor, Rank rank);
  void answer(
      const Scheduler& scheduler,
      Rank origin,
      std::uint32_t inquiry,
      std::span<const std::uint32_t> asked,
      const std::string& activity,
      std::vector<Addressed>& out) const;

  Rank rank_;
  int size_;
  std::uint32_t inquiry_ = 0; // number of the current inquiry
  std::vector<TensorKey> waiting_;
  std::vector<Missing> missing_;
  std::set<Rank> answered_;
  std::map<Rank, std::string> activities_; // of those that have told one
};

} // namespace hvd_order
