#include "scheduler/leader.h"

#include <algorithm>

#include "base/error.h"

// Rank 0 decides, and a counter for each slice says when it may.
//
// `lacking` counts the ranks, among rank 0 and those heard, on which the next round of a slice is
// not ready. At zero the slice is offered to the scheduler, which orders candidates by policy and
// credit. The offer starts the next round: rank 0 lacks it, and so does each heard rank whose
// reports are not ahead. A heard rank may be ahead, because it may report a slice again before
// rank 0 itself has the slice ready again; `ahead` counts these reports.
//
// Ranks start and stop being heard at any time. A rank that starts while a slice is offered gets
// -1: its report for that offer does not count for the next round. A rank that stops is removed
// from every round that it lacks. Reports of a rank that is no longer heard were sent before it
// received the answer, and are dropped.
//
// Invariant: for every slice, `lacking` = (1 if rank 0 lacks it) + the number of heard ranks with
// `ahead` <= 0, and a slice is offered exactly when that falls to zero.
//
// Sources: priority order from P3 (Jayarajan et al., MLSys 2019), credit from Peng et al.,
// SOSP 2019; docs/decisions/order-agreement.md compares the agreements.

namespace hvd_order {

Leader::Leader(int size, Policy policy, ByteCount creditBytes, bool hearsAll)
    : Agreement(policy, creditBytes), peers_(static_cast<std::size_t>(size)) {
  if (hearsAll) {
    for (Rank rank = 1; rank < size; ++rank) {
      hear(rank);
    }
  }
}

void Leader::addModel(
    ModelId model,
    std::shared_ptr<const SliceLayout> layout,
    std::vector<SliceIndex> plan) {
  const std::size_t slices = layout->slices().size();
  Agreement::addModel(model, std::move(layout), std::move(plan));
  if (models_.size() <= model) {
    models_.resize(model + 1);
  }
  models_[model].lacking.assign(slices, 1 + heardPeers_);
  models_[model].offered.assign(slices, 0);
  for (Peer& peer : peers_) {
    if (peer.ahead.size() <= model) {
      peer.ahead.resize(model + 1);
    }
    peer.ahead[model].assign(slices, 0);
  }
  const auto mine = std::stable_partition(
      early_.begin(), early_.end(),
      [model](const EarlyReport& r) { return r.slice.model != model; });
  const std::vector<EarlyReport> reports(mine, early_.end());
  early_.erase(mine, early_.end());
  for (const EarlyReport& report : reports) {
    reported(report.from, report.slice);
  }
}

const std::vector<SliceKey>& Leader::tensorReady(TensorKey tensor) {
  const std::vector<SliceKey>& ready = scheduler_.tensorReady(tensor);
  for (const SliceKey slice : ready) {
    lacksOneLess(slice);
  }
  return ready;
}

void Leader::received(Rank from, std::span<const SliceKey> slices) {
  HVDO_CHECK(
      from > 0 && static_cast<std::size_t>(from) < peers_.size(), "rank ", from,
      " sent a report to rank 0 of ", peers_.size());
  const bool heard = peers_[static_cast<std::size_t>(from)].heard;
  if (slices.empty()) {
    heard ? hearNoMore(from) : hear(from);
    answers_.push_back(from);
    return;
  }
  if (!heard) {
    return; // sent before the rank received the answer that it is no longer heard
  }
  for (const SliceKey slice : slices) {
    if (scheduler_.hasModel(slice.model)) {
      reported(from, slice);
    } else {
      early_.push_back({from, slice});
    }
  }
}

void Leader::reported(Rank from, SliceKey slice) {
  if (++peers_[static_cast<std::size_t>(from)].ahead[slice.model].at(slice.index) == 1) {
    lacksOneLess(slice);
  }
}

void Leader::lacksOneLess(SliceKey slice) {
  if (--models_[slice.model].lacking[slice.index] == 0) {
    offer(slice);
  }
}

void Leader::offer(SliceKey slice) {
  Model& model = models_[slice.model];
  model.offered[slice.index] = 1;
  model.lacking[slice.index] = 1;
  for (Peer& peer : peers_) {
    if (peer.heard && --peer.ahead[slice.model][slice.index] <= 0) {
      ++model.lacking[slice.index];
    }
  }
  scheduler_.offer(slice);
}

void Leader::hear(Rank rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.heard = true;
  ++heardPeers_;
  for (ModelId model = 0; model < models_.size(); ++model) {
    for (SliceIndex slice = 0; slice < models_[model].lacking.size(); ++slice) {
      ++models_[model].lacking[slice];
      peer.ahead[model][slice] = models_[model].offered[slice] ? -1 : 0;
    }
  }
}

void Leader::hearNoMore(Rank rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.heard = false;
  --heardPeers_;
  std::erase_if(early_, [rank](const EarlyReport& report) { return report.from == rank; });
  for (ModelId model = 0; model < models_.size(); ++model) {
    for (SliceIndex slice = 0; slice < models_[model].lacking.size(); ++slice) {
      if (peer.ahead[model][slice] <= 0) {
        lacksOneLess({model, slice});
      }
    }
  }
}

bool Leader::mayDecide() const {
  // A message to every rank costs about as much as a small slice. The window is therefore refilled
  // only when half of it has drained: messages are fewer and longer, and the other half keeps the
  // link busy.
  return peers_.size() == 1 || !answers_.empty() ||
      scheduler_.inFlightBytes() <= scheduler_.creditBytes() / 2;
}

void Leader::decide(Decisions& out) {
  for (const Rank rank : answers_) {
    out.messages.push_back({rank, {}});
  }
  answers_.clear();
  if (!mayDecide()) {
    return;
  }
  const std::size_t first = out.issue.size();
  while (const std::optional<SliceKey> slice = scheduler_.next()) {
    models_[slice->model].offered[slice->index] = 0;
    out.issue.push_back(*slice);
  }
  if (out.issue.size() == first) {
    return;
  }
  for (Rank rank = 1; static_cast<std::size_t>(rank) < peers_.size(); ++rank) {
    out.messages.push_back(
        {rank, {out.issue.begin() + static_cast<std::ptrdiff_t>(first), out.issue.end()}});
  }
}

void Leader::appendState(StateWords& words) const {
  Agreement::appendState(words);
  for (const Peer& peer : peers_) {
    words.push_back(peer.heard ? 1 : 0);
    for (const auto& model : peer.ahead) {
      if (peer.heard) { // else `hear` sets it anew
        words.insert(words.end(), model.begin(), model.end());
      }
    }
  }
  for (const Model& model : models_) {
    words.insert(words.end(), model.lacking.begin(), model.lacking.end());
    words.insert(words.end(), model.offered.begin(), model.offered.end());
  }
  words.push_back(early_.size());
  for (const EarlyReport& report : early_) {
    words.push_back(static_cast<std::uint64_t>(report.from));
    words.push_back(report.slice.word());
  }
  words.push_back(answers_.size());
  words.insert(words.end(), answers_.begin(), answers_.end());
}

} // namespace hvd_order
