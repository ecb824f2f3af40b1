#include "scheduler/leader.h"

#include <algorithm>

#include "base/error.h"

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
    return; // sent before it knew that it is heard no more
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
  // A message to every rank costs about as much as sending a small slice, so the window is filled
  // up only when half of it has drained: fewer, longer messages, while the other half keeps the
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

} // namespace hvd_order
