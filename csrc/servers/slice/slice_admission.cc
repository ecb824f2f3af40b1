#include "servers/slice/slice_admission.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "servers/slice/served_model.h"
#include "servers/wire/arguments.h"

// A worker asks before it pushes and states how many steps its parameters include. The delay of
// its update is the number of steps applied since; slack is what the bound leaves. delay_order.h
// chooses among the requests: updates that cannot be in time are skipped, and their workers get
// the present value at once; of the others the shortest transfer that endangers no other update
// goes next, if its connection has room (push_windows.h). If another server is the faster way
// (routes.h), all updates in time are admitted together, added there (aggregator.h) and applied as
// one update. That delays none of them: each is applied no later than in its own turn.
//
// Invariant: at most one admission is open per slice, and nothing is admitted while an update
// waits to be applied, because until then the number of applied steps is not known.
//
// A request is never lost: if an admission ends without its push, its requests return to the
// queue, unless the worker has asked again. After a new map, workers ask the new owner, and older
// requests are dropped (`switched`).
namespace hvd_order {

namespace {
constexpr Round kNoRound = 0; // marks a request that has been served
} // namespace

bool SliceAdmission::AdmittedPushes::isOf(int worker) const {
  return std::ranges::any_of(asks, [&](const PushRequest& ask) { return ask.worker == worker; });
}

void SliceAdmission::ask(int worker, const FrameHeader& header) {
  const bool isDirect = (header.flags & kFrameFlagDirect) != 0;
  if (isDirect && admission_ && !admission_->isDirect() && admission_->isOf(worker)) {
    giveUp();
  }
  std::erase_if(asks_, [&](const PushRequest& ask) { return ask.worker == worker; });
  asks_.push_back({worker, header.round, header.argument, header.map, isDirect});
}

bool SliceAdmission::pushCame(int worker, Round round) {
  if (!admission_ || !admission_->isDirect() || admission_->asks.front().worker != worker ||
      admission_->asks.front().round != round) {
    return false;
  }
  end(/*came=*/true);
  return true;
}

bool SliceAdmission::groupCame(
    Peer from,
    Round number,
    Payload total,
    std::vector<Member> members) {
  if (!admission_ || admission_->group.helper != from.number ||
      admission_->group.number != number) {
    answers_.reply({static_cast<ServerId>(from.number), number}, {});
    return false;
  }
  for (const Member& member : members) {
    const auto isIt = [&](const PushRequest& ask) {
      return ask.worker == member.worker && ask.round == member.round;
    };
    if (members.size() != admission_->asks.size() || std::ranges::none_of(admission_->asks, isIt)) {
      throw FrameError("a sum of other updates than were to be added up");
    }
  }
  arrived_ = admission_;
  end(/*came=*/true);
  store_.pushGroup(std::move(total), std::move(members));
  return true;
}

HelperGroup SliceAdmission::takeApplied() {
  const HelperGroup group = arrived_->group;
  arrived_.reset();
  return group;
}

void SliceAdmission::dropGroupIfApplied() {
  if (arrived_ && std::ranges::any_of(arrived_->asks, [&](const PushRequest& ask) {
        return store_.applied(ask.worker, ask.round);
      })) {
    askAgain(arrived_->asks);
    dropGroup();
  }
}

void SliceAdmission::dropGroup() {
  store_.dropGroup();
  if (arrived_) {
    answers_.reply(arrived_->group, {});
    arrived_.reset();
  }
}

void SliceAdmission::admitNext() {
  if (store_.waits()) {
    return; // what is late is known once that update is applied
  }
  std::erase_if(asks_, [&](const PushRequest& ask) {
    const bool wasMade = store_.applied(ask.worker, ask.round);
    if (wasMade) {
      answers_.queue(ask.worker, ask.round, kValuePart);
    }
    return wasMade;
  });
  const std::vector<WaitingUpdate> updates = waitingUpdates();
  const NextUpdates next = nextUpdates(updates);
  for (const std::size_t late : next.late) {
    store_.skip(asks_[late].worker, asks_[late].round);
    asks_[late].round = kNoRound;
  }
  if (!admission_ && !admitGroup(updates)) {
    std::vector<std::size_t> candidates = next.candidates;
    std::stable_sort(candidates.begin(), candidates.end(), [&](std::size_t a, std::size_t b) {
      return updates[a].seconds < updates[b].seconds;
    });
    admitOneOf(candidates);
  }
  std::erase_if(asks_, [](const PushRequest& ask) { return ask.round == kNoRound; });
}

std::vector<WaitingUpdate> SliceAdmission::waitingUpdates() const {
  const SliceState& state = store_.state();
  const auto steps = static_cast<std::int64_t>(state.stepsBefore + state.version);
  const auto bound = static_cast<std::int64_t>(*context_.options().delayBound);
  const auto turnsTaken = static_cast<std::int64_t>(admission_ ? admission_->asks.size() : 0);
  const PushWindows& windows = context_.model.room.windows;
  std::vector<WaitingUpdate> updates;
  updates.reserve(asks_.size());
  for (const PushRequest& ask : asks_) {
    // Before its first answer a worker has the model's initial parameters; a copy that took over
    // may include fewer steps than the worker's parameters.
    const auto read = static_cast<std::int64_t>(std::max(ask.read, state.stepsBefore));
    const std::int64_t delay = std::max<std::int64_t>(0, steps - read);
    updates.push_back(
        {bound - delay - turnsTaken, windows.expectedSeconds(ask.worker, context_.sizeBytes())});
  }
  return updates;
}

// Admits the first candidate whose connection has room; if none has, the waiter is called when one
// has.
void SliceAdmission::admitOneOf(const std::vector<std::size_t>& candidates) {
  ServerRoom& room = context_.model.room;
  const auto admitFirst = [&] {
    for (const std::size_t index : candidates) {
      PushRequest& ask = asks_[index];
      const double now = context_.options().clock();
      if (room.windows.take(ask.worker, context_.sizeBytes(), now)) {
        room.routes.taken(Routes::kDirect);
        admission_ = AdmittedPushes{{ask}, {}, now};
        FrameHeader header = context_.about(FrameKind::kAdmit);
        header.round = ask.round;
        context_.send({PeerKind::kWorker, ask.worker}, context_.urgency(), header, {});
        ask.round = kNoRound;
        return true;
      }
    }
    return false;
  };
  if (candidates.empty() || admitFirst()) {
    return;
  }
  std::vector<int> workers;
  workers.reserve(candidates.size());
  for (const std::size_t index : candidates) {
    workers.push_back(asks_[index].worker);
  }
  room.windows.await(workers, context_.key(), {context_.model.shared_from_this(), &waiter_});
  admitFirst(); // room may have been given back before `await`
}

// Admits all updates that are in time, through a helper: applied together, each is applied no
// later than in its own turn. Whether the workers' connections to this server have room does not
// matter, because their pushes take another way. If the helper has no room, the updates wait.
// @return false if there are fewer than two updates, or no helper is faster.
bool SliceAdmission::admitGroup(const std::vector<WaitingUpdate>& updates) {
  const ServerOptions& options = context_.options();
  const auto most = static_cast<std::size_t>(options.workers);
  if (!options.aggregates || context_.sizeBytes() + membersBytes(most) > options.largestSlice) {
    return false;
  }
  std::vector<std::size_t> able = delayBoundedOrder(updates).order;
  able.erase(
      std::ranges::find_if(able, [&](std::size_t index) { return asks_[index].isDirect; }),
      able.end());
  if (able.size() < 2) {
    return false;
  }
  const ServerId helper = helperFor(able.size());
  if (helper == Routes::kDirect) {
    return false;
  }
  const double now = options.clock();
  if (!hasRoom(helper, now)) {
    return true;
  }
  context_.model.room.routes.taken(helper);
  admission_ = AdmittedPushes{{}, {helper, ++groups_}, now};
  for (const std::size_t index : able) {
    admission_->asks.push_back(asks_[index]);
    asks_[index].round = kNoRound;
  }
  for (const PushRequest& ask : admission_->asks) {
    FrameHeader header = context_.about(FrameKind::kAdmit);
    header.flags = kFrameFlagGroup;
    header.round = ask.round;
    header.argument =
        GroupArgument{
            helper, static_cast<std::uint16_t>(admission_->asks.size()), admission_->group.number}
            .packed();
    context_.send({PeerKind::kWorker, ask.worker}, context_.urgency(), header, {});
  }
  return true;
}

// The fastest way for so many pushes; kDirect if that is to this server.
ServerId SliceAdmission::helperFor(std::size_t members) const {
  std::vector<ServerId> helpers;
  for (const Peer server : context_.peers().all(PeerKind::kServer)) {
    helpers.push_back(static_cast<ServerId>(server.number));
  }
  return context_.model.room.routes.best(members, helpers);
}

// Takes room for a sum of the helper's; if there is none, the waiter is called when there is.
bool SliceAdmission::hasRoom(ServerId helper, double now) {
  PushWindows& windows = context_.model.room.helperWindows;
  if (windows.take(helper, context_.sizeBytes(), now)) {
    return true;
  }
  windows.await({helper}, context_.key(), {context_.model.shared_from_this(), &waiter_});
  // Room may have been given back before `await`.
  return windows.take(helper, context_.sizeBytes(), now);
}

void SliceAdmission::end(bool came) {
  const auto ended = std::exchange(admission_, std::nullopt);
  if (!ended) {
    return;
  }
  ServerRoom& room = context_.model.room;
  const double now = context_.options().clock();
  const std::uint32_t sizeBytes = context_.sizeBytes();
  PushWindows& windows = ended->isDirect() ? room.windows : room.helperWindows;
  const int sender = ended->isDirect() ? ended->asks.front().worker : ended->group.helper;
  windows.giveBack(sender, sizeBytes, came, now);
  freed_.emplace_back(&windows, sender);
  if (came && sizeBytes > 0) {
    room.routes.took(ended->group.helper, (now - ended->since) / sizeBytes);
  }
}

void SliceAdmission::giveUp() {
  const std::vector<PushRequest> asks = admission_->asks;
  end(/*came=*/false);
  askAgain(asks);
}

void SliceAdmission::askAgain(const std::vector<PushRequest>& asks) {
  for (const PushRequest& mine : asks) {
    const auto isItsOwn = [&](const PushRequest& ask) { return ask.worker == mine.worker; };
    if (std::ranges::none_of(asks_, isItsOwn)) { // else the worker has asked again meanwhile
      asks_.push_back(mine);
    }
  }
}

void SliceAdmission::switched(int worker, std::uint32_t map) {
  const auto isOlder = [&](const PushRequest& ask) {
    return ask.worker == worker && ask.map < map;
  };
  if (admission_ && std::ranges::any_of(admission_->asks, isOlder)) {
    giveUp();
  }
  std::erase_if(asks_, isOlder);
}

void SliceAdmission::helperGone(ServerId server) {
  if (admission_ && admission_->group.helper == server) {
    giveUp();
  }
}

void SliceAdmission::retire() {
  asks_.clear();
  end(/*came=*/false);
}

} // namespace hvd_order
