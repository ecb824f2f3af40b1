#include "engine/health.h"

#include <algorithm>

#include "base/error.h"
#include "engine/activity.h"
#include "transport/control_words.h"

// Compares ready counts to find which rank holds up a collective.
//
// For each pending tensor, the query has the number of times that it became ready on this rank.
// A rank whose own count is smaller has not produced that gradient yet, so it is named as missing.
// Counts make the question independent of the moment at which it arrives. Tensors that share a
// slice with a pending tensor are asked for as well, since they hold up the slice; so are all
// gradients of a split layout for its squares. The tensors of the head of the agreed order are
// checked on this rank only.
//
// The control channel is a star. Rank 0 passes queries on to the other ranks, and replies to the
// rank that asked. If rank 0 does not answer, only rank 0 is reported as silent, because the other
// answers would have come through it.
//
// Invariants: every query has a number, and replies to older queries are dropped. If no rank lacks
// a gradient and all ranks have answered, the cause is the network or the backend.

namespace hvd_order {

namespace {

// A query is one message; more tensors would not help to find the cause.
constexpr std::size_t kMaxAsked = 32;
constexpr std::size_t kMaxNamed = 5;

bool knows(const Scheduler& scheduler, TensorKey tensor) {
  return scheduler.hasModel(tensor.model) &&
      tensor.tensor < scheduler.layout(tensor.model).tensors().size();
}

std::string nameOf(const Scheduler& scheduler, TensorKey tensor) {
  // A model of another shape may have the id by now.
  if (!knows(scheduler, tensor)) {
    return concat("tensor ", tensor.tensor, " of model ", tensor.model);
  }
  return concat("'", scheduler.layout(tensor.model).tensors().at(tensor.tensor).name, "'");
}

std::string rankList(const std::set<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const Rank rank : ranks) {
    text += concat(rank == *ranks.begin() ? "" : ", ", rank);
  }
  return text;
}

} // namespace

std::vector<Health::Addressed> Health::ask(
    const Scheduler& scheduler,
    std::vector<TensorKey> waiting,
    std::optional<SliceKey> head) {
  waiting_ = std::move(waiting);
  missing_.clear();
  answered_ = {rank_};
  activities_.clear();
  ControlMessage query{MessageKind::kQuery, {static_cast<std::uint32_t>(rank_), ++inquiry_}};
  if (head && scheduler.hasModel(head->model) && !scheduler.isReady(*head)) {
    for (const TensorId tensor : scheduler.layout(head->model).tensorsOf(head->index)) {
      if (!scheduler.isPending({head->model, tensor})) {
        note({head->model, tensor}, rank_);
      }
    }
  }
  std::size_t asked = 0;
  const auto askFor = [&](TensorKey tensor, std::uint32_t count) {
    if (asked < kMaxAsked) {
      query.words.insert(query.words.end(), {tensor.model, tensor.tensor, count});
      ++asked;
    }
    if (scheduler.readyCount(tensor) < count) {
      note(tensor, rank_);
    }
  };
  for (const TensorKey tensor : waiting_) {
    const std::uint32_t count = scheduler.readyCount(tensor);
    askFor(tensor, count);
    const auto askIfMissing = [&](TensorId other) {
      const TensorKey key{tensor.model, other};
      if (scheduler.readyCount(key) < count) {
        askFor(key, count);
      }
    };
    // Tensors that share a slice with it hold it up as well.
    const SliceLayout& layout = scheduler.layout(tensor.model);
    for (const SliceIndex slice : layout.slicesOf(tensor.tensor)) {
      std::ranges::for_each(layout.tensorsOf(slice), askIfMissing);
    }
    if (layout.isSplit() && tensor.tensor == layout.squaresTensor()) {
      for (TensorId other = 0; other < layout.squaresTensor(); ++other) {
        askIfMissing(other);
      }
    }
  }
  std::vector<Addressed> out;
  if (rank_ != 0) {
    out.push_back({0, query});
  } else {
    for (Rank rank = 1; rank < size_; ++rank) {
      out.push_back({rank, query});
    }
  }
  return out;
}

std::vector<Health::Addressed> Health::received(
    const Scheduler& scheduler,
    Rank from,
    const ControlMessage& message,
    const std::string& activity) {
  std::vector<Addressed> out;
  ControlWords words(from, message);
  const Rank origin = words.nextRank(size_, "the asking rank");
  const std::uint32_t inquiry = words.next("the number of the inquiry");
  if (message.kind == MessageKind::kQuery) {
    if (rank_ == 0 && origin != from) {
      words.refuse(concat("it asks for rank ", origin));
    }
    answer(scheduler, origin, inquiry, words.rest(3, "gradients"), activity, out);
    if (rank_ == 0) {
      for (Rank rank = 1; rank < size_; ++rank) {
        if (rank != from) {
          out.push_back({rank, message});
        }
      }
    }
    return out;
  }
  const Rank replier = words.nextRank(size_, "the answering rank");
  const bool isActivity = message.kind == MessageKind::kActivity;
  const std::span<const std::uint32_t> lacking =
      isActivity ? words.rest() : words.rest(2, "gradients");
  if (origin != rank_) {
    if (rank_ == 0) {
      out.push_back({origin, message});
    }
  } else if (inquiry == inquiry_ && isActivity) {
    activities_[replier] = textAt(message.words, 3);
  } else if (inquiry == inquiry_) { // not a late answer to an older query
    answered_.insert(replier);
    for (std::size_t i = 0; i < lacking.size(); i += 2) {
      note({lacking[i], lacking[i + 1]}, replier);
    }
  }
  return out;
}

void Health::answer(
    const Scheduler& scheduler,
    Rank origin,
    std::uint32_t inquiry,
    std::span<const std::uint32_t> asked,
    const std::string& activity,
    std::vector<Addressed>& out) const {
  ControlMessage reply{
      MessageKind::kReply,
      {static_cast<std::uint32_t>(origin), inquiry, static_cast<std::uint32_t>(rank_)}};
  for (std::size_t i = 0; i < asked.size(); i += 3) {
    const TensorKey tensor{asked[i], asked[i + 1]};
    if (!knows(scheduler, tensor) || scheduler.readyCount(tensor) < asked[i + 2]) {
      reply.words.insert(reply.words.end(), {tensor.model, tensor.tensor});
    }
  }
  const Rank to = rank_ == 0 ? origin : 0;
  out.push_back({to, std::move(reply)});
  if (!activity.empty()) {
    ControlMessage told{
        MessageKind::kActivity,
        {static_cast<std::uint32_t>(origin), inquiry, static_cast<std::uint32_t>(rank_)}};
    appendText(told.words, activity);
    out.push_back({to, std::move(told)});
  }
}

void Health::note(TensorKey tensor, Rank rank) {
  const auto known = std::find_if(
      missing_.begin(), missing_.end(), [&](const Missing& m) { return m.tensor == tensor; });
  if (known != missing_.end()) {
    known->ranks.insert(rank);
  } else {
    missing_.push_back({tensor, {rank}});
  }
}

std::string Health::report(const Scheduler& scheduler) const {
  std::string text = concat("rank ", rank_, " waits for the all-reduce of ");
  for (std::size_t i = 0; i < std::min(kMaxNamed, waiting_.size()); ++i) {
    text += concat(i == 0 ? "" : ", ", nameOf(scheduler, waiting_[i]));
  }
  if (waiting_.size() > kMaxNamed) {
    text += concat(" and ", waiting_.size() - kMaxNamed, " more");
  }
  for (std::size_t i = 0; i < std::min(kMaxNamed, missing_.size()); ++i) {
    text += concat(
        "; ", nameOf(scheduler, missing_[i].tensor), " has not been produced on ",
        rankList(missing_[i].ranks));
  }
  if (missing_.size() > kMaxNamed) {
    text += concat("; ", missing_.size() - kMaxNamed, " more are missing");
  }
  for (const auto& [rank, activity] : activities_) {
    text += concat("; meanwhile rank ", rank, " ", activity);
  }
  std::set<Rank> silent;
  for (Rank rank = 0; rank < size_; ++rank) {
    if (!answered_.contains(rank)) {
      silent.insert(rank);
    }
  }
  if (silent.contains(0)) {
    silent = {0}; // the other answers would have come through rank 0
  }
  if (!silent.empty()) {
    text += concat("; no answer from ", rankList(silent));
  } else if (missing_.empty()) {
    text += "; every rank has produced its gradients, so the network or the backend is stuck";
  }
  return text;
}

} // namespace hvd_order
