#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "servers/admission/routes.h"
#include "servers/slice/slice_context.h"
#include "servers/slice/slice_store.h"
#include "servers/wire/group.h"

namespace hvd_order {

/// A group of updates that a helper adds up for this slice.
struct HelperGroup {
  ServerId helper = Routes::kDirect; ///< kDirect: no group, one worker pushes to this server
  std::uint32_t number = 0;          ///< counted by slice
};

/// The answers that a slice owes to workers, and to helpers for the workers of a group.
///
/// Not thread-safe.
class SliceAnswers {
 public:
  SliceAnswers(const SliceContext& context, const SliceStore& store)
      : context_(context), store_(store) {}

  /// Queues the answer to a worker: one part of the state, after its push of this round or for a
  /// pull.
  void queue(int worker, Round round, std::uint32_t part);
  /// Queues the answers to all workers whose update this is.
  void queue(const SliceStore::AppliedUpdate& update);
  /// Same for a group's sum, whose helper can answer all members at once.
  void queue(HelperGroup group, const std::vector<Member>& members);

  /// Sends the answers that are due. An asynchronous answer waits until its worker is no more than
  /// `staleness` rounds ahead of the slowest one.
  void send();

  /// Replies to a helper, exactly once for each group. Without a value in the reply, the members
  /// get their answers from here.
  void reply(HelperGroup group, Payload value) const;
  /// Answers the members of the last group from here.
  void giveUpHelper();
  /// Hands all answers to the slice's new owner, as pulls.
  /// @param map version of the map by which the slice moves.
  void passOn(ServerId owner, std::uint32_t map);

 private:
  struct Answer {
    int worker;
    Round round;
    std::uint32_t part;
  };
  struct Relay {
    HelperGroup group;
    std::vector<Member> members;
  };

  [[nodiscard]] bool isDue(int worker, Round round) const;
  void sendTo(const Answer& to) const;
  void sendByHelper();

  const SliceContext& context_;
  const SliceStore& store_;
  std::vector<Answer> queued_;
  std::optional<Relay> relay_; // the group applied last, until its helper has a reply
};

} // namespace hvd_order
