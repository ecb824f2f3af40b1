#include "servers/slice/slice_store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"

// The state of one slice and the updates that change it; no locks, no network.
//
// `seen` is the core of the state: for each worker the last round that has been applied. It tells
// whether a push is new, due, or a repetition that only needs its answer, so pushes may be sent
// again after the loss of a server. Synchronous: all entries of `seen` are equal, and round r + 1
// is applied when the push of every worker is there, added in rank order, so the result does not
// depend on the order of arrival. Asynchronous: the waiting push of the lowest round is applied,
// and by default only if it directly follows its worker's last round.
//
// If a replica may lag (`mayMiss`), updates may be lost with their server. A worker pushes a round
// only after it has the answer to the round before, so a round that a worker has gone beyond is
// over, and `seen` skips it.
//
// Invariant: payloads are never written while another holder refers to them. Answers and states on
// their way to other processes share the memory of `value` and the moments, so an update first
// copies an array that has another holder.
//
// A replica applies the same updates with the same rules in the same order (`follow`), so its
// state is bitwise the owner's: update_rule.h promises it on CPUs of one architecture.
namespace hvd_order {

namespace {

std::span<float> floats(const Payload& payload) {
  return {reinterpret_cast<float*>(payload.data()), payload.sizeBytes / sizeof(float)};
}

double distance(std::span<const float> a, std::span<const float> b) {
  double squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - b[i];
    squares += difference * difference;
  }
  return std::sqrt(squares);
}

} // namespace

RuleBook::const_iterator rulesFor(const RuleBook& rules, Round round) {
  auto found = std::prev(rules.end());
  while (found != rules.begin() && found->second.since > round) {
    --found;
  }
  return found;
}

SliceStore::SliceStore(
    const SliceShape& shape,
    bool serversUpdate,
    Consistency consistency,
    int workers,
    bool mayMiss)
    : shape_(shape),
      serversUpdate_(serversUpdate),
      consistency_(consistency),
      workers_(workers),
      mayMiss_(mayMiss) {}

void SliceStore::begin(Payload value) {
  SliceState state;
  state.seen.assign(static_cast<std::size_t>(workers_), 0);
  state.skipped.assign(static_cast<std::size_t>(workers_), 0);
  state.value = std::move(value);
  install(std::move(state));
}

void SliceStore::install(SliceState state) {
  HVDO_CHECK(state.seen.size() == static_cast<std::size_t>(workers_));
  HVDO_CHECK(state.skipped.size() == state.seen.size());
  state_ = std::move(state);
  installed_ = true;
}

void SliceStore::uninstall() {
  state_ = {};
  installed_ = false;
}

bool SliceStore::isBehind(const SliceState& other) const {
  return state_.seen != other.seen &&
      std::equal(
             state_.seen.begin(), state_.seen.end(), other.seen.begin(), other.seen.end(),
             [](Round mine, Round its) { return mine <= its; });
}

bool SliceStore::applied(int worker, Round round) const {
  return installed_ && round <= state_.seen[static_cast<std::size_t>(worker)];
}

void SliceStore::push(int worker, Round round, Payload gradient) {
  const auto index = static_cast<std::size_t>(worker);
  waiting_.resize(static_cast<std::size_t>(workers_));
  if (round < waiting_[index].round) {
    return; // a repeated push; the worker has pushed a later round since
  }
  waiting_[index] = {round, std::move(gradient)};
}

void SliceStore::skip(int worker, Round round) {
  waiting_.resize(static_cast<std::size_t>(workers_));
  waiting_[static_cast<std::size_t>(worker)] = {round, {}, /*isSkipped=*/true};
}

void SliceStore::pushGroup(Payload total, std::vector<Member> members) {
  group_ = WaitingGroup{std::move(total), std::move(members)};
}

bool SliceStore::dropGroup() {
  return std::exchange(group_, std::nullopt).has_value();
}

std::vector<SliceStore::WaitingPush> SliceStore::takeWaiting() {
  group_.reset();
  return std::exchange(waiting_, {});
}

std::vector<std::pair<int, Round>> SliceStore::takeApplied() {
  std::vector<std::pair<int, Round>> taken;
  if (mayMiss_) {
    giveUpMissed();
  }
  for (std::size_t worker = 0; worker < waiting_.size(); ++worker) {
    const Round round = waiting_[worker].round;
    if (round > 0 && applied(static_cast<int>(worker), round)) {
      taken.emplace_back(static_cast<int>(worker), round);
      waiting_[worker] = {};
    }
  }
  return taken;
}

bool SliceStore::waits() const {
  return group_ || std::any_of(waiting_.begin(), waiting_.end(), [](const WaitingPush& push) {
           return push.isHere();
         });
}

std::vector<int> SliceStore::missing() const {
  std::vector<int> late;
  for (std::size_t worker = 0; worker < waiting_.size(); ++worker) {
    if (!waiting_[worker].isHere()) {
      late.push_back(static_cast<int>(worker));
    }
  }
  return late;
}

Round SliceStore::slowest() const {
  return installed_ ? *std::min_element(state_.seen.begin(), state_.seen.end()) : 0;
}

// Synchronous: a worker that pushes a round has the answer to the round before, so that round is
// over.
void SliceStore::giveUpMissed() {
  if (consistency_ != Consistency::kSynchronous || !installed_) {
    return;
  }
  for (const WaitingPush& push : waiting_) {
    over_ = std::max(over_, push.round > 0 ? push.round - 1 : 0);
  }
  if (over_ > state_.seen.front()) {
    std::fill(state_.seen.begin(), state_.seen.end(), over_);
  }
}

// Asynchronous: whether the update may be applied to the state held here. If not, its worker
// computed it from a state that is still on its way to this server.
bool SliceStore::follows(int worker, Round round) const {
  return mayMiss_ || round == state_.seen[static_cast<std::size_t>(worker)] + 1;
}

// Asynchronous: moves the next group or push that may be applied into `update`.
bool SliceStore::takeNext(AppliedUpdate& update) {
  if (group_ && std::ranges::all_of(group_->members, [&](const Member& member) {
        return follows(member.worker, member.round);
      })) {
    WaitingGroup group = *std::exchange(group_, std::nullopt);
    update.worker = group.members.front().worker;
    update.round = group.members.front().round;
    update.sum = std::move(group.sum);
    update.members = std::move(group.members);
    return true;
  }
  const auto push = nextPush();
  if (push == waiting_.end()) {
    return false;
  }
  update.worker = static_cast<int>(push - waiting_.begin());
  update.round = push->round;
  update.sum = std::exchange(*push, {}).gradient;
  return true;
}

// The waiting push of the lowest round, among those that may be applied.
std::vector<SliceStore::WaitingPush>::iterator SliceStore::nextPush() {
  auto next = waiting_.end();
  for (auto push = waiting_.begin(); push != waiting_.end(); ++push) {
    if (push->isHere() && follows(static_cast<int>(push - waiting_.begin()), push->round) &&
        (next == waiting_.end() || push->round < next->round)) {
      next = push;
    }
  }
  return next;
}

bool SliceStore::isWhole(Round round) const {
  return std::all_of(waiting_.begin(), waiting_.end(), [&](const WaitingPush& push) {
    return bool(push.gradient) && push.round == round;
  });
}

std::optional<SliceStore::AppliedUpdate> SliceStore::advance(
    const RuleBook& rules,
    bool measureChange) {
  if (!installed_ || !waits()) {
    return std::nullopt;
  }
  if (serversUpdate_ && (rules.empty() || rules.rbegin()->first < neededRules_)) {
    return std::nullopt;
  }
  AppliedUpdate update{0, kEveryWorker, {}, 0, 0};
  if (consistency_ == Consistency::kSynchronous) {
    update.round = state_.seen.front() + 1;
    if (!isWhole(update.round)) {
      return std::nullopt;
    }
    std::vector<const std::byte*> inputs;
    inputs.reserve(waiting_.size());
    for (const WaitingPush& push : waiting_) {
      inputs.push_back(push.gradient.data());
    }
    update.sum = Payload::allocate(shape_.sizeBytes);
    sum(shape_.type, inputs, update.sum.data(), shape_.sizeBytes);
    waiting_.clear();
  } else if (!takeNext(update)) {
    return std::nullopt;
  }
  const Rules* inForce = nullptr;
  if (serversUpdate_) {
    const auto found = rulesFor(rules, update.round);
    update.rules = found->first;
    inForce = found->second.rules.get();
  }
  apply(update, inForce, measureChange);
  return update;
}

bool SliceStore::follow(const AppliedUpdate& update, Round version, const RuleBook& rules) {
  if (!installed_ || version != state_.version + update.count() ||
      applied(std::max(update.worker, 0), update.round) ||
      std::ranges::any_of(update.members, [&](const Member& member) {
        return applied(member.worker, member.round);
      })) {
    throw FrameError(concat("an update of round ", update.round, " that does not follow"));
  }
  // Rules arrive in order: a server that has later rules has these, or has dropped them.
  if (serversUpdate_ && (rules.empty() || rules.rbegin()->first < update.rules)) {
    return false;
  }
  AppliedUpdate mine = update;
  apply(
      mine, serversUpdate_ ? rules.lower_bound(update.rules)->second.rules.get() : nullptr,
      /*measureChange=*/false);
  return true;
}

void SliceStore::apply(AppliedUpdate& update, const Rules* rules, bool measureChange) {
  if (update.sum) {
    if (serversUpdate_) {
      this->update(*rules, update, measureChange);
    } else {
      state_.value = update.sum;
    }
    state_.version += update.count();
  } else {
    state_.skipped[static_cast<std::size_t>(update.worker)] = update.round;
  }
  if (update.worker == kEveryWorker) {
    std::fill(state_.seen.begin(), state_.seen.end(), update.round);
  } else if (!update.members.empty()) {
    for (const Member& member : update.members) {
      state_.seen[static_cast<std::size_t>(member.worker)] = member.round;
    }
  } else {
    state_.seen[static_cast<std::size_t>(update.worker)] = update.round;
  }
}

void SliceStore::update(const Rules& rules, AppliedUpdate& update, bool measureChange) {
  std::size_t moments = 0;
  for (const Segment& segment : shape_.segments) {
    moments = std::max(moments, momentsOf(rules.at(segment.group)));
  }
  // Answers and states on their way still refer to the old arrays, so those must not change.
  const Payload before = measureChange ? state_.value : Payload{};
  const auto makeOwn = [](Payload& payload) {
    // Releasing the second reference orders the writes below behind the other holders' reads.
    const std::shared_ptr<std::byte> mine = payload.memory;
    if (mine.use_count() > 2) {
      payload = Payload::copyOf(std::span(payload.data(), payload.sizeBytes));
    }
  };
  makeOwn(state_.value);
  std::for_each(state_.moments.begin(), state_.moments.end(), makeOwn);
  const bool isFirst = state_.moments.empty();
  while (state_.moments.size() < moments) {
    state_.moments.push_back(Payload::allocate(shape_.sizeBytes));
    std::memset(state_.moments.back().data(), 0, shape_.sizeBytes);
  }
  const std::span<float> value = floats(state_.value);
  const std::span<const float> slope = floats(update.sum);
  std::size_t done = 0;
  for (const Segment& segment : shape_.segments) {
    // Elements that belong to no parameter (padding, use flags) are only summed.
    std::ranges::copy(slope.subspan(done, segment.first - done), value.subspan(done).begin());
    std::vector<std::span<float>> mine;
    mine.reserve(kMostMoments);
    for (std::size_t moment = 0; moment < momentsOf(rules.at(segment.group)); ++moment) {
      mine.push_back(floats(state_.moments[moment]).subspan(segment.first, segment.count));
    }
    const UpdateRule& rule = rules.at(segment.group);
    if (isFirst) {
      initialiseMoments(rule, mine);
    }
    hvd_order::apply(
        rule, state_.stepsBefore + state_.version + update.count(),
        slope.subspan(segment.first, segment.count), value.subspan(segment.first, segment.count),
        mine);
    done = std::size_t{segment.first} + segment.count;
  }
  std::ranges::copy(slope.subspan(done), value.subspan(done).begin());
  if (measureChange) {
    update.change = distance(floats(before), value);
  }
}

} // namespace hvd_order
