#include "servers/slice/slice_answers.h"

#include <algorithm>
#include <utility>

#include "servers/wire/arguments.h"

// What workers are owed after their pushes and pulls, and when it is sent.
//
// Every applied update adds an entry for each worker in it, every pull one for its worker. The
// owner of this object calls `send` whenever the replica permits answers (slice_replication.h);
// `send` then answers all entries whose round is applied and, asynchronously, whose worker is not
// too far ahead of the slowest one (stale synchronous parallel: Ho et al., NIPS 2013).
//
// The sum of a group is one update. If all its members may be answered when the next answers go
// out, its helper answers them; otherwise the helper gets an empty reply and each member is
// answered from here when its turn has come.
//
// Invariant: a helper gets exactly one reply to each sum, because it keeps the group until then
// (aggregator.h). An entry goes only when its answer has been sent or when the entry has been
// passed on to a new owner.
namespace hvd_order {

void SliceAnswers::queue(int worker, Round round, std::uint32_t part) {
  queued_.push_back({worker, round, part});
}

void SliceAnswers::queue(const SliceStore::AppliedUpdate& update) {
  if (update.worker != SliceStore::kEveryWorker) {
    return queue(update.worker, update.round, kValuePart);
  }
  for (int worker = 0; worker < context_.options().workers; ++worker) {
    queue(worker, update.round, kValuePart);
  }
}

void SliceAnswers::queue(HelperGroup group, const std::vector<Member>& members) {
  for (const Member& member : members) {
    queue(member.worker, member.round, kValuePart);
  }
  giveUpHelper(); // some members of the group before may not be answered yet
  relay_ = Relay{group, members};
}

void SliceAnswers::send() {
  if (queued_.empty()) {
    return;
  }
  sendByHelper();
  std::erase_if(queued_, [&](const Answer& owed) {
    const bool due = isDue(owed.worker, owed.round);
    if (due) {
      sendTo(owed);
    }
    return due;
  });
}

bool SliceAnswers::isDue(int worker, Round round) const {
  const ServerOptions& options = context_.options();
  const bool tooFarAhead = options.consistency == Consistency::kAsynchronous &&
      round > std::uint64_t{store_.slowest()} + options.staleness;
  return !tooFarAhead && store_.applied(worker, round);
}

void SliceAnswers::sendTo(const Answer& to) const {
  const SliceState& state = store_.state();
  const std::size_t moment = to.part - kValuePart - 1; // not used for the value
  FrameHeader header = context_.about(FrameKind::kValue);
  header.round = to.round;
  header.map = to.part;
  header.argument = state.stepsBefore + state.version;
  header.flags = store_.wasSkipped(to.worker, to.round) ? kFrameFlagLate : std::uint16_t{0};
  context_.send(
      {PeerKind::kWorker, to.worker}, context_.urgency(), header,
      to.part == kValuePart               ? state.value
          : moment < state.moments.size() ? state.moments[moment]
                                          : Payload{});
}

// Lets the helper answer the last group if all members may be answered now.
void SliceAnswers::sendByHelper() {
  if (!relay_ || !context_.peers().hasServer(relay_->group.helper)) {
    relay_.reset();
    return;
  }
  if (!std::ranges::all_of(relay_->members, [&](const Member& member) {
        return isDue(member.worker, member.round);
      })) {
    return giveUpHelper();
  }
  reply(relay_->group, store_.state().value);
  std::erase_if(queued_, [&](const Answer& owed) {
    return owed.part == kValuePart &&
        std::ranges::find(relay_->members, Member{owed.worker, owed.round}) !=
        relay_->members.end();
  });
  relay_.reset();
}

void SliceAnswers::reply(HelperGroup group, Payload value) const {
  FrameHeader header = context_.about(FrameKind::kValue);
  header.flags = kFrameFlagGroup;
  header.round = group.number;
  header.argument = store_.state().stepsBefore + store_.state().version;
  context_.send({PeerKind::kServer, group.helper}, context_.urgency(), header, std::move(value));
}

void SliceAnswers::giveUpHelper() {
  if (const auto relay = std::exchange(relay_, std::nullopt)) {
    reply(relay->group, {});
  }
}

void SliceAnswers::passOn(ServerId owner, std::uint32_t map) {
  for (const Answer& owed : std::exchange(queued_, {})) {
    FrameHeader pull = context_.about(FrameKind::kPull);
    pull.round = owed.round;
    pull.map = map;
    pull.argument = PullArgument{owed.part, static_cast<std::uint32_t>(owed.worker)}.packed();
    context_.send({PeerKind::kServer, owner}, context_.urgency(), pull, {});
  }
}

} // namespace hvd_order
