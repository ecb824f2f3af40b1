#include <algorithm>
#include <utility>

#include "server/slice/served_model.h"
#include "server/slice/served_slice.h"
#include "server/wire/arguments.h"

// Where the delay of updates is bounded: which worker may push a slice next, and by which way.
//
// A worker asks before it pushes and states how many steps its parameters include. The delay of
// its update is the number of steps applied since; slack is what the bound leaves. delay_order.h
// chooses among the requests: updates that cannot be in time are skipped, and their workers get
// the present value at once; of the others the shortest transfer that endangers no other update
// goes next, if its line has room (push_windows.h). If another server is the faster way
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

bool ServedSlice::Admission::isOf(int worker) const {
  return std::ranges::any_of(asks, [&](const Ask& ask) { return ask.worker == worker; });
}

void ServedSlice::ask(int worker, const FrameHeader& header) {
  if (!asksFirst()) {
    throw FrameError("nobody has to ask before a push here");
  }
  if (header.round == 0) {
    throw FrameError("rounds count from 1");
  }
  const Work work(*this);
  const bool isDirect = (header.flags & kFrameFlagDirect) != 0;
  if (isDirect && admission_ && admission_->helper != Routes::kDirect && admission_->isOf(worker)) {
    giveUpAdmission();
  }
  std::erase_if(asks_, [&](const Ask& ask) { return ask.worker == worker; });
  asks_.push_back({worker, header.round, header.argument, header.map, isDirect});
  settleNow();
}

void ServedSlice::groupCame(Peer from, const FrameHeader& header, const Payload& payload) {
  auto [total, members] = splitMembers(payload, sizeBytes(), model_.room.options.workers);
  const Work work(*this);
  if (!admission_ || admission_->helper != from.number || admission_->group != header.round) {
    return tellHelper(static_cast<ServerId>(from.number), header.round, {}); // it was given up
  }
  for (const Member& member : members) {
    const auto isIt = [&](const Ask& ask) {
      return ask.worker == member.worker && ask.round == member.round;
    };
    if (members.size() != admission_->asks.size() || std::ranges::none_of(admission_->asks, isIt)) {
      throw FrameError("a sum of other updates than were to be added up");
    }
  }
  arrived_ = admission_;
  endAdmission(/*came=*/true);
  held_.pushGroup(std::move(total), std::move(members));
  settleNow();
}

void ServedSlice::admit() {
  const Work work(*this);
  settleNow();
}

// Queues answers for workers whose update has been made, perhaps by a lost server; counts updates
// that are too late as made; admits the next push if none is admitted.
void ServedSlice::admitNext() {
  if (held_.waits()) {
    return; // what is late is known once that update is applied
  }
  std::erase_if(asks_, [&](const Ask& ask) {
    const bool wasMade = held_.applied(ask.worker, ask.round);
    if (wasMade) {
      owed_.push_back({ask.worker, ask.round, kValuePart});
    }
    return wasMade;
  });
  const std::vector<WaitingUpdate> updates = waitingUpdates();
  const NextUpdates next = nextUpdates(updates);
  for (const std::size_t late : next.late) {
    held_.skip(asks_[late].worker, asks_[late].round);
    asks_[late].round = kNoRound;
  }
  if (!admission_ && !admitGroup(updates)) {
    std::vector<std::size_t> candidates = next.candidates;
    std::stable_sort(candidates.begin(), candidates.end(), [&](std::size_t a, std::size_t b) {
      return updates[a].seconds < updates[b].seconds;
    });
    admitOneOf(candidates);
  }
  std::erase_if(asks_, [](const Ask& ask) { return ask.round == kNoRound; });
}

std::vector<WaitingUpdate> ServedSlice::waitingUpdates() const {
  const SliceState& state = held_.state();
  const auto steps = static_cast<std::int64_t>(state.stepsBefore + state.version);
  const auto bound = static_cast<std::int64_t>(*model_.room.options.delayBound);
  const auto turnsTaken = static_cast<std::int64_t>(admission_ ? admission_->asks.size() : 0);
  std::vector<WaitingUpdate> updates;
  updates.reserve(asks_.size());
  for (const Ask& ask : asks_) {
    // Before its first answer a worker has the model's initial parameters; a copy that took over
    // may include fewer steps than the worker's parameters.
    const auto read = static_cast<std::int64_t>(std::max(ask.read, state.stepsBefore));
    const std::int64_t delay = std::max<std::int64_t>(0, steps - read);
    updates.push_back(
        {bound - delay - turnsTaken, model_.room.windows.expectedSeconds(ask.worker, sizeBytes())});
  }
  return updates;
}

// Admits the first candidate whose line has room; if none has, this slice is called when one has.
void ServedSlice::admitOneOf(const std::vector<std::size_t>& candidates) {
  PushWindows& windows = model_.room.windows;
  const auto admitFirst = [&] {
    for (const std::size_t index : candidates) {
      Ask& ask = asks_[index];
      const double now = model_.room.options.clock();
      if (windows.take(ask.worker, sizeBytes(), now)) {
        model_.room.routes.taken(Routes::kDirect);
        admission_ = Admission{{ask}, Routes::kDirect, 0, now};
        FrameHeader header = model_.about(FrameKind::kAdmit, index_);
        header.round = ask.round;
        send({Peer::Kind::kWorker, ask.worker}, urgency(), header, {});
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
  windows.await(workers, key(), {model_.shared_from_this(), this});
  admitFirst(); // room may have been given back before `await`
}

// Admits all updates that are in time, through a helper: applied together, each is applied no
// later than in its own turn. Whether the workers' lines to this server have room does not matter,
// because their pushes take another way. If the helper has no room, the updates wait.
// @return false if there are fewer than two updates, or no helper is faster.
bool ServedSlice::admitGroup(const std::vector<WaitingUpdate>& updates) {
  const ServerOptions& options = model_.room.options;
  const auto most = static_cast<std::size_t>(options.workers);
  if (!options.aggregates || sizeBytes() + membersBytes(most) > options.largestSlice) {
    return false;
  }
  std::vector<std::size_t> able = delayBoundedOrder(updates).order;
  able.erase(
      std::ranges::find_if(able, [&](std::size_t index) { return asks_[index].isDirect; }),
      able.end());
  if (able.size() < 2) {
    return false;
  }
  std::vector<ServerId> helpers;
  for (const Peer server : model_.room.peers.all(Peer::Kind::kServer)) {
    helpers.push_back(static_cast<ServerId>(server.number));
  }
  const ServerId helper = model_.room.routes.best(able.size(), helpers);
  if (helper == Routes::kDirect) {
    return false;
  }
  PushWindows& windows = model_.room.helperWindows;
  const double now = options.clock();
  if (!windows.take(helper, sizeBytes(), now)) {
    windows.await({helper}, key(), {model_.shared_from_this(), this});
    if (!windows.take(helper, sizeBytes(), now)) { // room may have been given back before `await`
      return true;
    }
  }
  model_.room.routes.taken(helper);
  admission_ = Admission{{}, helper, ++groups_, now};
  for (const std::size_t index : able) {
    admission_->asks.push_back(asks_[index]);
    asks_[index].round = kNoRound;
  }
  for (const Ask& ask : admission_->asks) {
    FrameHeader header = model_.about(FrameKind::kAdmit, index_);
    header.flags = kFrameFlagGroup;
    header.round = ask.round;
    header.argument = argumentOf(
        {helper, static_cast<std::uint16_t>(admission_->asks.size()), admission_->group});
    send({Peer::Kind::kWorker, ask.worker}, urgency(), header, {});
  }
  return true;
}

void ServedSlice::endAdmission(bool came) {
  const auto ended = std::exchange(admission_, std::nullopt);
  if (!ended) {
    return;
  }
  const double now = model_.room.options.clock();
  const bool isDirect = ended->helper == Routes::kDirect;
  PushWindows& windows = isDirect ? model_.room.windows : model_.room.helperWindows;
  const int sender = isDirect ? ended->asks.front().worker : ended->helper;
  windows.giveBack(sender, sizeBytes(), came, now);
  freed_.emplace_back(&windows, sender);
  if (came && sizeBytes() > 0) {
    model_.room.routes.took(ended->helper, (now - ended->since) / sizeBytes());
  }
}

void ServedSlice::giveUpAdmission() {
  const std::vector<Ask> asks = admission_->asks;
  endAdmission(/*came=*/false);
  askAgain(asks);
}

void ServedSlice::askAgain(const std::vector<Ask>& asks) {
  for (const Ask& mine : asks) {
    const auto isItsOwn = [&](const Ask& ask) { return ask.worker == mine.worker; };
    if (std::ranges::none_of(asks_, isItsOwn)) { // else the worker has asked again meanwhile
      asks_.push_back(mine);
    }
  }
}

void ServedSlice::retire() {
  const Work work(*this);
  asks_.clear();
  endAdmission(/*came=*/false);
}

void ServedSlice::switched(int worker, std::uint32_t map) {
  if (!asksFirst()) {
    return;
  }
  const Work work(*this);
  const auto isOlder = [&](const Ask& ask) { return ask.worker == worker && ask.map < map; };
  if (admission_ && std::ranges::any_of(admission_->asks, isOlder)) {
    giveUpAdmission();
  }
  std::erase_if(asks_, isOlder);
  settleNow();
}

} // namespace hvd_order
