#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/types.h"
#include "scheduler/scheduler.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Finds out who is to blame when nothing moves: asks all ranks whether they have the gradients
/// that this rank waits for. Pure; the engine carries its messages and calls it under its lock.
///
/// Rank 0 relays: a query reaches every rank, each answers with what it lacks, the answers go back
/// to the rank that asked.
class Health final {
 public:
  struct Addressed {
    Rank to;
    ControlMessage message;
  };

  Health(Rank rank, int size) : rank_(rank), size_(size) {}

  /// Begins a new inquiry; answers to older ones no longer count.
  /// @param waiting the tensors that are under way here.
  /// @param head the slice agreed to go next, which may be what this rank itself lacks.
  /// @return the messages to send.
  std::vector<Addressed> ask(
      const Scheduler& scheduler,
      std::vector<TensorKey> waiting,
      std::optional<SliceKey> head = std::nullopt);

  /// Handles kQuery and kReply. @return the messages to send.
  std::vector<Addressed>
  received(const Scheduler& scheduler, Rank from, const ControlMessage& message);

  /// What is known by now, one line: the tensors that do not come, which ranks lack them, and
  /// which ranks did not answer.
  [[nodiscard]] std::string report(const Scheduler& scheduler) const;

 private:
  struct Missing {
    TensorKey tensor;
    std::set<Rank> ranks;
  };

  void note(TensorKey tensor, Rank rank);
  void answer(const Scheduler& scheduler, const ControlMessage& query, std::vector<Addressed>& out);

  Rank rank_;
  int size_;
  std::uint32_t inquiry_ = 0; // the number of the current one
  std::vector<TensorKey> waiting_;
  std::vector<Missing> missing_;
  std::set<Rank> answered_;
};

/// A text as words of a control message, cut to what fits one message, and back.
std::vector<std::uint32_t> packText(const std::string& text);
std::string unpackText(const std::vector<std::uint32_t>& words);

} // namespace hvd_order
