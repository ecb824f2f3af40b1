#include "engine/watch.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/failure_message.h"

// A suspicion. When a rank dies, its neighbours see broken connections, and some of them were only
// closed by a rank that failed for the same reason. The control channel knows who died, but its
// message may come a moment later. So the error of a transfer waits for a short time; if no
// culprit is named until then, the job fails with the transfer's own error.
//
// A stall. The clock of a model runs while one of its exchanges is under way. First the other ranks
// are asked which gradients they lack, then a warning reports the answers, then the job fails with
// them. Without a warning before half of the timeout, that half is the time of the question.
//
// Stranding. A rank that shuts down has finished all exchanges that it took part in, so an exchange
// that is under way long after cannot end: this rank trains for more steps than that one. The time
// until then lets sums arrive that were already on their way.
//
// Invariants: `look` never returns an action after `end`. A stall is asked about once, and warned
// of once, until the model moves or another one is the longest stalled.

namespace hvd_order {

namespace {

using namespace std::chrono_literals;

// Time for which a failed transfer waits for the control channel to name the rank that caused it.
constexpr auto kSuspicionTime = 300ms;
// Time from the question to the other ranks until a stall is reported.
constexpr auto kAnswerTime = 1s;

} // namespace

StallWatch::StallWatch(Rank rank, int size, Limits limits, Clock::time_point now)
    : rank_(rank), size_(size), limits_(limits), lastProgress_(now) {}

void StallWatch::addModel(ModelId model, Clock::time_point now) {
  progressOf_[model] = now;
}

void StallWatch::removeModel(ModelId model) {
  progressOf_.erase(model);
}

void StallWatch::progress(ModelId model, Clock::time_point now) {
  const auto known = progressOf_.find(model);
  if (known == progressOf_.end()) {
    return; // the caller is about to hear that there is no such model
  }
  known->second = now;
  lastProgress_ = now;
  if (askedFor_ == model) {
    askedFor_.reset();
    warned_ = false;
  }
}

void StallWatch::transferFailed(std::exception_ptr error, Clock::time_point now) {
  if (!suspicion_ && !ended_) {
    suspicion_ = std::move(error);
    suspicionEnds_ = now + (size_ > 1 ? kSuspicionTime : 0ms);
  }
}

void StallWatch::rankLeft(Rank rank, Clock::time_point now) {
  if (!left_) {
    left_ = rank;
    leftAt_ = now;
  }
}

void StallWatch::end() {
  ended_ = true;
  suspicion_ = nullptr;
}

StallWatch::Action StallWatch::look(Clock::time_point now, std::span<const ModelId> underWay) {
  if (ended_) {
    return {};
  }
  const auto longest = longestStall(underWay);
  const bool stranded = left_ && longest && now >= strandedAt();
  const bool suspected = suspicion_ && now >= suspicionEnds_;
  if (stranded || (suspected && left_)) { // the end of that rank is why the transfer failed
    return {.kind = ActionKind::kFail, .error = strandedError()};
  }
  if (suspected) {
    return {.kind = ActionKind::kFail, .error = withoutCulprit(suspicion_)};
  }
  if (!longest) {
    return {};
  }
  if (askedFor_ && askedFor_ != longest->model) { // that one has come to its end
    askedFor_.reset();
    warned_ = false;
  }
  const auto stalled = now - longest->since;
  if (stalled >= limits_.timeout) {
    return {.kind = ActionKind::kTimeOut};
  }
  if (!askedFor_ && stalled >= patience()) {
    askedFor_ = longest->model;
    return {.kind = ActionKind::kAsk, .model = longest->model};
  }
  if (askedFor_ && !warned_ && stalled >= limits_.warning + kAnswerTime) {
    warned_ = true;
    return {.kind = ActionKind::kWarn, .stalled = stalled};
  }
  return {};
}

StallWatch::Clock::time_point StallWatch::nextLook(
    Clock::time_point now,
    std::span<const ModelId> underWay) const {
  if (suspicion_) {
    return suspicionEnds_;
  }
  if (ended_ || progressOf_.empty()) {
    return Clock::time_point::max();
  }
  const auto longest = longestStall(underWay);
  if (!longest) {
    // Looks now and then whether an exchange has begun: cheaper than to be woken by each one.
    return now + patience() / 4;
  }
  if (left_) {
    return strandedAt();
  }
  if (askedFor_ != longest->model) {
    return longest->since + patience();
  }
  const Clock::time_point end = longest->since + limits_.timeout;
  return warned_ ? end : std::min(end, longest->since + limits_.warning + kAnswerTime);
}

bool StallWatch::isNearlyTimedOut(Clock::time_point now, std::span<const ModelId> underWay) const {
  const auto longest = longestStall(underWay);
  return !ended_ && longest && askedFor_ == longest->model &&
      now - longest->since >= limits_.timeout - limits_.timeout / 10;
}

std::optional<StallWatch::Stall> StallWatch::longestStall(std::span<const ModelId> underWay) const {
  std::optional<Stall> longest;
  for (const ModelId model : underWay) {
    const auto known = progressOf_.find(model);
    if (known != progressOf_.end() && (!longest || known->second < longest->since)) {
      longest = {model, known->second};
    }
  }
  return longest;
}

std::chrono::nanoseconds StallWatch::patience() const {
  return std::min(limits_.warning, limits_.timeout / 2);
}

StallWatch::Clock::time_point StallWatch::strandedAt() const {
  return std::max(lastProgress_, leftAt_) + kSuspicionTime;
}

std::exception_ptr StallWatch::strandedError() const {
  return std::make_exception_ptr(PeerLost(concat(
      "rank ", *left_, " has ended its training, while rank ", rank_,
      " has gradients of a further step: ranks need equally many steps (hvd.join() is for those "
      "that have less data), or rank ",
      *left_, " ended early and its output says why")));
}

// Replaces the error if no rank is known to be gone: the connection itself broke.
std::exception_ptr StallWatch::withoutCulprit(const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(withRank(error, rank_));
  } catch (const ServerLost&) {
    return error; // it names the server
  } catch (const PeerLost& lost) {
    if (size_ == 1) {
      return error;
    }
    return std::make_exception_ptr(PeerLost(concat(
        "rank ", rank_,
        " lost a connection to another rank, though none is known to have "
        "ended; look at the network between their hosts (",
        lost.what(), ")")));
  } catch (...) {
    return std::current_exception();
  }
}

} // namespace hvd_order
