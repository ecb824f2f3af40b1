#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"
#include "scheduler/scheduler.h"

namespace hvd_order {

/// How all ranks come to issue the same slices in the same order.
enum class AgreementKind {
  kLeader,     ///< rank 0 picks from what is ready there, and on ranks that were late
  kNegotiated, ///< rank 0 picks from what is ready everywhere; costs one trip to rank 0
  kPlanned,    ///< every rank follows the plan; no messages
};

/// Slices that one rank tells another about. What is said depends on the direction: towards rank 0
/// "these are ready here", from rank 0 "issue these next, in this order". None: see leader.h.
struct SliceMessage {
  Rank to;
  std::vector<SliceKey> slices;
};

/// What to do now.
struct Decisions {
  std::vector<SliceKey> issue;        ///< in this order
  std::vector<SliceMessage> messages; ///< before issuing, so that others hear early

  void clear() {
    issue.clear();
    messages.clear();
  }
};

/// One rank's half of the order agreement. Pure, like the Scheduler it drives: events in, decisions
/// out, no thread, clock or I/O.
///
/// Promises, whatever the timing on each rank: all ranks issue the same sequence of slices; each
/// slice goes once for each time it is ready; a rank never has more than the credit in flight; and
/// if all ranks make the same tensors ready, every slice is issued in the end.
///
/// Messages from one rank to another must arrive in the order in which they were sent.
/// Thread safety: none; the owner calls it under its own lock.
class Agreement {
 public:
  static std::unique_ptr<Agreement>
  create(AgreementKind kind, Rank rank, int size, Policy policy, ByteCount creditBytes);

  virtual ~Agreement() = default;

  /// As Scheduler::addModel. Every rank registers the same models with the same ids.
  virtual void
  addModel(ModelId model, std::shared_ptr<const SliceLayout> layout, std::vector<SliceIndex> plan);
  /// As Scheduler::removeModel. No rank may add the id again before all have removed it.
  void removeModel(ModelId model);

  /// As Scheduler::retune. Every rank does the same between the same two steps.
  void retune(Policy policy, ByteCount creditBytes) {
    scheduler_.retune(policy, creditBytes);
  }

  /// As Scheduler::reserve; heeded where order is decided, on rank 0.
  void reserve(ByteCount largestBytes) {
    scheduler_.reserve(largestBytes);
  }

  /// The gradient of `tensor` lies in its buffer. As Scheduler::tensorReady.
  virtual const std::vector<SliceKey>& tensorReady(TensorKey tensor) = 0;
  /// A message of `from` has come.
  virtual void received(Rank from, std::span<const SliceKey> slices) = 0;
  /// Gives the credit back; returns the tensors that are complete now, valid until the next call.
  const std::vector<TensorKey>& sliceDone(SliceKey slice) {
    return scheduler_.sliceDone(slice);
  }
  /// Adds everything that can be decided now to `out`.
  virtual void decide(Decisions& out) = 0;
  /// Whether `decide` may have something to say; if not, only an event other than `tensorReady`
  /// can change that.
  [[nodiscard]] virtual bool mayDecide() const {
    return true;
  }
  /// The slice that everything after it waits for here, since it is agreed to go next; it may not
  /// be ready. None where nothing is agreed ahead.
  [[nodiscard]] virtual std::optional<SliceKey> head() const {
    return std::nullopt;
  }

  [[nodiscard]] const Scheduler& scheduler() const {
    return scheduler_;
  }

 protected:
  Agreement(Policy policy, ByteCount creditBytes) : scheduler_(policy, creditBytes) {}

  Scheduler scheduler_;
};

} // namespace hvd_order
