#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "servers/admission/delay_order.h"
#include "servers/admission/push_windows.h"
#include "servers/slice/slice_answers.h"
#include "servers/slice/slice_context.h"
#include "servers/slice/slice_store.h"

namespace hvd_order {

/// Which worker may push a slice next, and by which way, where the delay of updates is bounded.
///
/// A worker asks before it pushes. The server admits one worker at a time, in the order of
/// delay_order.h. If the update could not be applied in time, the worker instead receives the
/// present value at once, and its update counts as made. Several workers whose turns are next may
/// be told to push to a helper (aggregator.h), whose sum counts as all their updates. A worker
/// keeps its gradient until it has its answer, so it can be admitted again if the helper fails.
/// When a slice moves, workers ask the new owner again, so requests do not move with the slice.
///
/// Not thread-safe.
class SliceAdmission {
 public:
  /// @param waiter is called when a connection has room for a push that waits.
  SliceAdmission(
      const SliceContext& context,
      SliceStore& store,
      SliceAnswers& answers,
      PushWindows::WaitingSlice& waiter)
      : context_(context), store_(store), answers_(answers), waiter_(waiter) {}

  /// Queues a worker's request.
  void ask(int worker, const FrameHeader& header);
  /// Ends the admission of a push that has come. @return false if it was admitted before a map
  /// came, by which its worker asks again.
  bool pushCame(int worker, Round round);
  /// Stores a helper's sum. @return false if its group was given up; the helper has a reply then.
  /// @throws FrameError if it is the sum of other updates.
  bool groupCame(Peer from, Round number, Payload total, std::vector<Member> members);
  /// The group whose sum has been applied just now.
  HelperGroup takeApplied();
  /// Drops the group that waits to be applied if the state contains some of its updates already: a
  /// sum cannot be split. Its workers' requests return to the queue.
  void dropGroupIfApplied();
  /// Drops what is left of a group: its members will ask again.
  void dropGroup();

  /// Owes answers to workers whose update has been made, perhaps by a lost server; counts updates
  /// that are too late as made; admits the next push if none is admitted.
  void admitNext();
  /// The worker sends no more requests by an older map.
  void switched(int worker, std::uint32_t map);
  /// Gives up a group whose helper is lost.
  void helperGone(ServerId server);
  /// No more pushes come.
  void retire();

  /// Removes and returns the senders that have room again, with the windows that count them.
  std::vector<std::pair<PushWindows*, int>> takeFreed() {
    return std::exchange(freed_, {});
  }

 private:
  struct PushRequest {
    int worker;
    Round round;
    std::uint64_t read; // steps that the worker's parameters include
    std::uint32_t map;
    bool isDirect; // the worker has no connection to the helper it was given
  };
  // Admitted pushes: one to this server, or several to a helper.
  struct AdmittedPushes {
    std::vector<PushRequest> asks;
    HelperGroup group;
    double since = 0;
    [[nodiscard]] bool isOf(int worker) const;
    [[nodiscard]] bool isDirect() const {
      return group.helper == Routes::kDirect;
    }
  };

  [[nodiscard]] std::vector<WaitingUpdate> waitingUpdates() const;
  void admitOneOf(const std::vector<std::size_t>& candidates);
  bool admitGroup(const std::vector<WaitingUpdate>& updates);
  [[nodiscard]] ServerId helperFor(std::size_t members) const;
  bool hasRoom(ServerId helper, double now);
  void end(bool came);
  void giveUp();
  void askAgain(const std::vector<PushRequest>& asks);

  const SliceContext& context_;
  SliceStore& store_;
  SliceAnswers& answers_;
  PushWindows::WaitingSlice& waiter_;
  std::vector<PushRequest> asks_; // at most one per worker
  std::optional<AdmittedPushes> admission_;
  std::optional<AdmittedPushes> arrived_; // the group whose sum waits to be applied
  std::uint32_t groups_ = 0;              // number of groups so far
  std::vector<std::pair<PushWindows*, int>> freed_;
};

} // namespace hvd_order
