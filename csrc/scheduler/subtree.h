#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/agreement.h"
#include "scheduler/tree.h"

namespace hvd_order {

/// A rank and the ranks below it in the tree, as that rank knows them: which slices are ready on
/// itself and on the children that it *hears*, and what its children are still to be told. Pure.
///
/// A round of a slice is one time that it becomes ready, is decided and is summed. A rank reports a
/// round to its parent when the round is *complete*: ready on the rank and on all children that it
/// hears.
///
/// An empty message from a child asks to be heard; a second one asks to be heard no more. The
/// answer is an empty message in the stream of decisions to that child. From the first answer to
/// the second, the child reports each round once, except rounds that were decided before the first.
class Subtree final {
 public:
  /// @param hearsAll hear all children from the start, without a request.
  /// @param reports report from the start.
  Subtree(Rank rank, int size, int fanOut, bool hearsAll, bool reports);

  [[nodiscard]] const TreePlace& place() const {
    return place_;
  }
  /// Whether the reports of this child count; it is one.
  [[nodiscard]] bool hears(Rank child) const {
    return children_[static_cast<std::size_t>(child - place_.firstChild)].heard;
  }
  [[nodiscard]] bool hearsAny() const {
    return heard_ > 0;
  }
  [[nodiscard]] bool reports() const {
    return reports_;
  }

  // The next four append to `complete` each slice once for each of its rounds to report.

  /// The slice has become ready on this rank.
  void ready(SliceKey slice, std::vector<SliceKey>& complete);
  /// Handles a message of a child.
  void received(Rank child, std::span<const SliceKey> slices, std::vector<SliceKey>& complete);
  /// The parent hears this rank from now on.
  /// @param undecided slices that are ready on this rank and not decided.
  void startReports(std::span<const SliceKey> undecided, std::vector<SliceKey>& complete);
  /// The parent hears this rank no more.
  void stopReports() {
    reports_ = false;
  }

  /// These slices are decided, in this order: all children are to be told.
  void decided(std::span<const SliceKey> slices);

  [[nodiscard]] bool hasMessages() const {
    return !messages_.empty();
  }
  /// Moves the messages for the children to the end of `out`.
  void takeMessages(std::vector<SliceMessage>& out);

  /// Same as Agreement::appendState.
  void appendState(StateWords& words) const;

 private:
  using Round = std::uint32_t; // number of rounds of a slice, from the start

  struct SliceRounds {
    Round ready = 0;    // on this rank
    Round decided = 0;  // passed to the children
    Round reported = 0; // to the parent, or decided before reports began
  };
  struct Child {
    bool heard = false;
    std::vector<std::vector<Round>> reported; // by model and slice
  };

  void report(SliceKey slice, std::vector<SliceKey>& complete);
  void hear(Child& child);
  void hearNoMore(Child& child, std::vector<SliceKey>& complete);

  const TreePlace place_;
  bool reports_;
  int heard_ = 0;
  std::vector<Child> children_;
  std::vector<std::vector<SliceRounds>> counts_; // by model and slice
  std::vector<SliceMessage> messages_;
};

} // namespace hvd_order
