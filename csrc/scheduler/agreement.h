#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"
#include "scheduler/scheduler.h"
#include "scheduler/tree.h"

namespace hvd_order {

/// Rule by which all ranks issue the same slices in the same order.
enum class AgreementKind {
  kLeader,     ///< rank 0 picks slices ready on itself and on the ranks it hears
  kNegotiated, ///< rank 0 picks slices ready on all ranks; costs a trip up the tree
  kPlanned,    ///< every rank follows the plan; no messages
};

/// When a follower asks its parent to hear it, and to stop (follower.h).
struct HearingLimits {
  int holdUps = 3;      ///< in a backward pass
  int passesHeard = 64; ///< backward passes
};

/// A message about slices to a neighbour in the tree of ranks (tree.h). Its meaning depends on the
/// direction. To the parent: these slices are ready on the sender and the ranks below it. To a
/// child: issue these slices next, in this order. An empty list: see subtree.h.
struct SliceMessage {
  Rank to;
  std::vector<SliceKey> slices;
};

/// What the owner of an agreement has to do now.
struct Decisions {
  std::vector<SliceKey> issue;        ///< in this order
  std::vector<SliceMessage> messages; ///< send before issuing, so that they arrive early

  void clear() {
    issue.clear();
    messages.clear();
  }
};

/// One rank's half of the order agreement. Pure, like the Scheduler it drives: events in,
/// decisions out, no thread, clock or I/O.
///
/// Guarantees for any timing of the ranks:
/// - All ranks issue the same sequence of slices.
/// - Each slice is issued once for each time it is ready.
/// - No rank has more bytes in flight than the credit, apart from squares (slice_layout.h).
/// - If all ranks make the same tensors ready, every slice is issued in the end.
///
/// Requires that messages from one rank to another arrive in the order in which they were sent.
/// Thread safety: none; the owner calls it under its own lock.
class Agreement {
 public:
  /// @param fanOut largest number of ranks to which a rank sends each decision; the same on every
  ///   rank.
  static std::unique_ptr<Agreement> create(
      AgreementKind kind,
      Rank rank,
      int size,
      Policy policy,
      ByteCount creditBytes,
      int fanOut = kFanOut,
      HearingLimits hearing = {});

  virtual ~Agreement() = default;

  /// Same as Scheduler::addModel. Every rank registers the same models with the same ids.
  void
  addModel(ModelId model, std::shared_ptr<const SliceLayout> layout, std::vector<SliceIndex> plan);
  /// Same as Scheduler::removeModel. No rank may reuse the id before all ranks have removed it.
  void removeModel(ModelId model);

  /// Takes over the models of a planned agreement in the middle of a step: handles the slices that
  /// are ready and not in flight as if they had become ready now. All ranks call it after they have
  /// issued equally many slices, on an agreement without models.
  void succeed(Agreement&& planned, Policy policy);

  /// Whether no model is registered, so that another agreement can take over.
  [[nodiscard]] bool isEmpty() const {
    return scheduler_.isEmpty();
  }
  /// Whether this agreement sends and expects no messages.
  [[nodiscard]] virtual bool isSilent() const {
    return false;
  }

  /// Same as Scheduler::retune. All ranks make the same call between the same two steps.
  void retune(Policy policy, ByteCount creditBytes) {
    scheduler_.retune(policy, creditBytes);
  }

  /// Same as Scheduler::reserve. Has an effect only on rank 0, which decides the order.
  void reserve(ByteCount largestBytes) {
    scheduler_.reserve(largestBytes);
  }

  /// Passes the event to Scheduler::tensorReady, and each slice that became ready to `sliceReady`.
  /// @return these slices; valid until the next call.
  const std::vector<SliceKey>& tensorReady(TensorKey tensor);
  /// Handles a message from rank `from`.
  virtual void received(Rank from, std::span<const SliceKey> slices) = 0;
  /// Returns the slice's credit. @return the tensors that are now complete; valid until the next
  /// call. Slices that became ready: `Scheduler::becameReady`.
  const std::vector<TensorKey>& sliceDone(SliceKey slice);
  /// Appends all slices to issue and all messages to send now to `out`.
  virtual void decide(Decisions& out) = 0;
  /// Whether `decide` may have a result. If false, it stays false until an event other than
  /// `tensorReady`.
  [[nodiscard]] virtual bool mayDecide() const {
    return true;
  }
  /// The slice that is agreed to be issued next on this rank, ready or not; all later slices wait
  /// for it. None if no slice is agreed ahead.
  [[nodiscard]] virtual std::optional<SliceKey> head() const {
    return std::nullopt;
  }

  [[nodiscard]] const Scheduler& scheduler() const {
    return scheduler_;
  }

  /// Returns an agreement in the same state, which then goes its own way.
  [[nodiscard]] virtual std::unique_ptr<Agreement> clone() const = 0;
  /// Appends all that later decisions depend on, apart from what never changes.
  virtual void appendState(StateWords& words) const {
    scheduler_.appendState(words);
  }

 protected:
  Agreement(Policy policy, ByteCount creditBytes) : scheduler_(policy, creditBytes) {}

  /// Requires that each slice exists, as far as its model is registered here.
  /// @throws MalformedMessage names rank `from`.
  void checkExist(Rank from, std::span<const SliceKey> slices) const;

  Scheduler scheduler_;

 private:
  /// Handles a slice that has become ready on this rank.
  virtual void sliceReady(SliceKey slice) = 0;
};

} // namespace hvd_order
