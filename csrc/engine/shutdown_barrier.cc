#include "engine/shutdown_barrier.h"

#include <algorithm>
#include <utility>

#include "transport/control_words.h"

// Words of the messages:
//   kBarrier  2 words, a count of slices. To rank 0: the sender wants to leave with this count.
//              From rank 0: the receiver is to reply when it has finished this count.
//   kFinished  2 words, a count. To rank 0: the sender has finished this count. From rank 0: all
//              ranks have the receiver's count, so the receiver may leave.
//   kMissing   To rank 0, no words: which ranks does the sender wait for? From rank 0:
//              those ranks.

namespace hvd_order {

namespace {

ControlMessage withCount(MessageKind kind, std::uint64_t count) {
  return {kind, {static_cast<std::uint32_t>(count >> 32), static_cast<std::uint32_t>(count)}};
}

std::uint64_t countOf(Rank from, const ControlMessage& message) {
  ControlWords words(from, message);
  const std::uint64_t count = words.next64("its count of slices");
  words.end();
  return count;
}

} // namespace

ShutdownBarrier::ShutdownBarrier(Rank rank, int size)
    : rank_(rank),
      size_(size),
      mayLeave_(size == 1),
      finished_(rank == 0 ? static_cast<std::size_t>(size) : 0, 0) {}

std::vector<ShutdownBarrier::Addressed> ShutdownBarrier::begin() {
  if (mayLeave_) {
    return {};
  }
  return rank_ == 0 ? received(0, withCount(MessageKind::kBarrier, done_))
                    : std::vector<Addressed>{{0, withCount(MessageKind::kBarrier, done_)}};
}

std::vector<ShutdownBarrier::Addressed> ShutdownBarrier::sliceDone() {
  ++done_;
  if (rank_ == 0) {
    return leaving_.empty() ? std::vector<Addressed>{} : letGo();
  }
  if (wanted_ == 0 || done_ < wanted_) {
    return {};
  }
  wanted_ = 0;
  return {{0, withCount(MessageKind::kFinished, done_)}};
}

std::vector<ShutdownBarrier::Addressed> ShutdownBarrier::received(
    Rank from,
    const ControlMessage& message) {
  if (rank_ != 0) {
    if (message.kind == MessageKind::kMissing) {
      ControlWords words(from, message);
      std::vector<Rank> missing;
      for (const std::uint32_t word : words.rest()) {
        missing.push_back(words.rank(word, size_, "a rank that is waited for"));
      }
      missing_ = std::move(missing);
      answered_ = true;
      return {};
    }
    const std::uint64_t count = countOf(from, message);
    if (message.kind == MessageKind::kFinished) {
      mayLeave_ = true;
    } else if (done_ >= count) {
      return {{0, withCount(MessageKind::kFinished, done_)}};
    } else {
      wanted_ = std::max(wanted_, count);
    }
    return {};
  }
  if (message.kind == MessageKind::kMissing) {
    ControlWords(from, message).end();
    const auto leaver = leaving_.find(from);
    ControlMessage answer{MessageKind::kMissing, {}};
    if (leaver != leaving_.end()) {
      for (const Rank rank : lacking(leaver->second.count)) {
        answer.words.push_back(static_cast<std::uint32_t>(rank));
      }
    }
    return {{from, answer}};
  }
  const std::uint64_t count = countOf(from, message);
  std::uint64_t& finished = finished_.at(static_cast<std::size_t>(from));
  finished = std::max(finished, count);
  std::vector<Addressed> out;
  if (message.kind == MessageKind::kBarrier) {
    leaving_[from] = {count, false};
    if (count > asked_) {
      asked_ = count;
      for (const Rank rank : lacking(count)) {
        if (rank != 0) {
          out.push_back({rank, withCount(MessageKind::kBarrier, count)});
        }
      }
    }
  }
  const std::vector<Addressed> more = letGo();
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

std::vector<ShutdownBarrier::Addressed> ShutdownBarrier::gone(Rank rank) {
  if (rank_ != 0) {
    mayLeave_ = mayLeave_ || rank == 0; // without rank 0 no rank can finish another slice
    return {};
  }
  gone_.insert(rank);
  leaving_.erase(rank);
  return letGo();
}

std::vector<ShutdownBarrier::Addressed> ShutdownBarrier::ask() {
  if (rank_ != 0) {
    return {{0, {MessageKind::kMissing, {}}}};
  }
  const auto own = leaving_.find(0);
  missing_ = own == leaving_.end() ? std::vector<Rank>{} : lacking(own->second.count);
  answered_ = true;
  return {};
}

// On rank 0: informs the ranks that may leave by now.
std::vector<ShutdownBarrier::Addressed> ShutdownBarrier::letGo() {
  finished_[0] = done_;
  std::uint64_t fewest = done_;
  for (Rank rank = 1; rank < size_; ++rank) {
    if (!gone_.contains(rank)) {
      fewest = std::min(fewest, finished_[static_cast<std::size_t>(rank)]);
    }
  }
  // If all ranks want to leave, no rank finishes another slice.
  const bool all = leaving_.size() + gone_.size() == static_cast<std::size_t>(size_);
  std::vector<Addressed> out;
  for (auto& [rank, leaver] : leaving_) {
    if (leaver.told || (!all && fewest < leaver.count)) {
      continue;
    }
    leaver.told = true;
    if (rank == 0) {
      mayLeave_ = true;
    } else {
      out.push_back({rank, withCount(MessageKind::kFinished, leaver.count)});
    }
  }
  return out;
}

std::vector<Rank> ShutdownBarrier::lacking(std::uint64_t count) const {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < size_; ++rank) {
    if (!gone_.contains(rank) && finished_[static_cast<std::size_t>(rank)] < count) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

} // namespace hvd_order
