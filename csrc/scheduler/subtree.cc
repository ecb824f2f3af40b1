#include "scheduler/subtree.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

// Merges the reports of a subtree into one report a round.
//
// All counters count rounds from the start of the agreement, so they need no correction when a
// child starts or stops being heard. The rounds that are complete are the least of `ready` and of
// `reported` of the children that are heard; a rank that reports keeps its own `reported` equal to
// that. Rank 0 reports to its scheduler, and nothing else differs. Tables grow with the first
// mention of a slice: a child may report a slice of a model that this rank has yet to register.
//
// Both ends of an edge must agree on the first round that is reported. The answer to a request has
// its place in the stream of decisions to the child: rounds decided before it are never reported,
// rounds decided after it always. So both ends set `reported` of the child to the rounds decided so
// far, and no message needs a sequence number. Each edge of the tree starts and stops for itself:
// a child may be heard before its parent is, and rank 0 may decide rounds that are reported later.
//
// Invariants:
// - `reported` at the two ends of an edge differ only by the reports under way, and `reported`
//   never decreases while the child is heard.
// - `ready` <= `decided` + 1 for every slice: a rank has issued a round before the next is ready.
// - A round that was complete before a child is heard stays complete.
// - Reports of a child that is not heard are dropped: it sent them before it received the answer
//   that it is heard no more.
// - `messages_` has the decisions and answers for each child in the order in which they were made.

namespace hvd_order {

namespace {

template <typename T>
T& grownAt(std::vector<std::vector<T>>& table, SliceKey slice) {
  if (table.size() <= slice.model) {
    table.resize(slice.model + 1);
  }
  std::vector<T>& row = table[slice.model];
  if (row.size() <= slice.index) {
    row.resize(slice.index + 1);
  }
  return row[slice.index];
}

} // namespace

Subtree::Subtree(Rank rank, int size, int fanOut, bool hearsAll, bool reports)
    : place_(placeInTree(rank, size, fanOut)),
      reports_(reports),
      children_(static_cast<std::size_t>(place_.children)) {
  if (hearsAll) {
    for (Child& child : children_) {
      hear(child);
    }
  }
}

void Subtree::ready(SliceKey slice, std::vector<SliceKey>& complete) {
  ++grownAt(counts_, slice).ready;
  report(slice, complete);
}

void Subtree::report(SliceKey slice, std::vector<SliceKey>& complete) {
  if (!reports_) {
    return;
  }
  SliceRounds& counts = grownAt(counts_, slice);
  Round least = counts.ready;
  for (Child& child : children_) {
    if (child.heard) {
      least = std::min(least, grownAt(child.reported, slice));
    }
  }
  for (; counts.reported < least; ++counts.reported) {
    complete.push_back(slice);
  }
}

void Subtree::startReports(std::span<const SliceKey> undecided, std::vector<SliceKey>& complete) {
  reports_ = true;
  for (std::vector<SliceRounds>& model : counts_) {
    for (SliceRounds& counts : model) {
      counts.reported = counts.decided;
    }
  }
  // Of no other slice is a round complete that is not decided.
  for (const SliceKey slice : undecided) {
    report(slice, complete);
  }
}

void Subtree::received(
    Rank child,
    std::span<const SliceKey> slices,
    std::vector<SliceKey>& complete) {
  Child& sender = children_.at(static_cast<std::size_t>(child - place_.firstChild));
  if (slices.empty()) {
    sender.heard ? hearNoMore(sender, complete) : hear(sender);
    messages_.push_back({child, {}});
    return;
  }
  if (!sender.heard) {
    return;
  }
  for (const SliceKey slice : slices) {
    ++grownAt(sender.reported, slice);
    report(slice, complete);
  }
}

void Subtree::hear(Child& child) {
  child.heard = true;
  ++heard_;
  child.reported.resize(counts_.size());
  for (ModelId model = 0; model < counts_.size(); ++model) {
    child.reported[model].assign(counts_[model].size(), 0);
    std::ranges::transform(counts_[model], child.reported[model].begin(), [](const SliceRounds& c) {
      return c.decided;
    });
  }
}

void Subtree::hearNoMore(Child& child, std::vector<SliceKey>& complete) {
  child.heard = false;
  --heard_;
  for (ModelId model = 0; model < counts_.size(); ++model) {
    for (SliceIndex slice = 0; slice < counts_[model].size(); ++slice) {
      report({model, slice}, complete);
    }
  }
}

void Subtree::decided(std::span<const SliceKey> slices) {
  for (const SliceKey slice : slices) {
    ++grownAt(counts_, slice).decided;
  }
  for (Rank child = place_.firstChild; place_.isChild(child); ++child) {
    messages_.push_back({child, {slices.begin(), slices.end()}});
  }
}

void Subtree::takeMessages(std::vector<SliceMessage>& out) {
  std::ranges::move(messages_, std::back_inserter(out));
  messages_.clear();
}

// Counts of rounds grow forever; only their distances to the decided rounds matter, and those of
// ranks that report or are heard.
void Subtree::appendState(StateWords& words) const {
  words.push_back(reports_ ? 1 : 0);
  for (const Child& child : children_) {
    words.push_back(child.heard ? 1 : 0);
  }
  for (ModelId model = 0; model < counts_.size(); ++model) {
    words.push_back(counts_[model].size());
    for (SliceIndex slice = 0; slice < counts_[model].size(); ++slice) {
      const SliceRounds& counts = counts_[model][slice];
      words.push_back(counts.ready - counts.decided);
      words.push_back(reports_ ? counts.reported - counts.decided : 0);
    }
  }
  for (const Child& child : children_) {
    for (ModelId model = 0; child.heard && model < child.reported.size(); ++model) {
      words.push_back(child.reported[model].size());
      for (SliceIndex slice = 0; slice < child.reported[model].size(); ++slice) {
        const bool known = model < counts_.size() && slice < counts_[model].size();
        words.push_back(child.reported[model][slice] - (known ? counts_[model][slice].decided : 0));
      }
    }
  }
  words.push_back(messages_.size());
  for (const SliceMessage& message : messages_) {
    words.push_back(static_cast<std::uint64_t>(message.to));
    appendSlices(words, message.slices);
  }
}

} // namespace hvd_order
