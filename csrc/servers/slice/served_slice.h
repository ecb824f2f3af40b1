#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "servers/admission/push_windows.h"
#include "servers/slice/replica_follower.h"
#include "servers/slice/slice_admission.h"
#include "servers/slice/slice_answers.h"
#include "servers/slice/slice_context.h"
#include "servers/slice/slice_replication.h"
#include "servers/slice/slice_store.h"
#include "servers/slice/state_parts.h"

namespace hvd_order {

class ServedModel;

/// One slice as a server has it: receives pushes, makes updates, and sends answers and copies.
///
/// One server has the original of a slice. Its replica has a copy, and so, for a moment, do the
/// servers that had the slice before. When the server with the original is lost, the copy becomes
/// the original at the slice's owner by the map: either here, or at the owner after the copy has
/// been sent there. So a server may be lost at any moment of a move.
///
/// Its parts: the state (slice_store.h), its original's replication (slice_replication.h) or its
/// life as a copy (replica_follower.h), what workers are owed (slice_answers.h), and who may push
/// next (slice_admission.h). This class holds their lock, decides which of them a frame concerns,
/// and moves the slice.
///
/// Thread safety: all methods may be called from any thread. Methods that handle frames throw
/// FrameError if the frame does not fit, and have changed nothing then.
class ServedSlice final : public PushWindows::WaitingSlice {
 public:
  ServedSlice(ServedModel& model, SliceIndex index);

  // Frames from and to workers. `worker` is the rank whose push or pull it is: a server may pass
  // on a frame that came to it too late.
  void push(Peer from, int worker, const FrameHeader& header, Payload payload);
  void pull(Peer from, int worker, const FrameHeader& header);
  void rulesCame();

  // For workers that ask before they push.
  void ask(int worker, const FrameHeader& header);
  /// Handles a helper's sum of several workers' updates.
  void groupCame(Peer from, const FrameHeader& header, const Payload& payload);
  void admit() override;
  /// The worker sends no more requests by an older map.
  void switched(int worker, std::uint32_t map);
  /// All workers have a newer layout of the model: no more frames come.
  void retire();

  // Between servers.
  void stateCame(Peer from, const FrameHeader& header, Payload payload);
  /// Handles an update that the original has made.
  void copyCame(Peer from, const FrameHeader& header, Payload payload);
  /// Handles the acknowledgement of a copy.
  void copyArrived(Peer from, const FrameHeader& header);
  /// @param begins the map is the model's first.
  void place(SliceOwners place, std::uint32_t map, bool allSwitched, bool begins);
  void passOnFromNow();
  void serverGone(ServerId server);
  void peersChanged();

  struct Report {
    bool owned; ///< else a copy, for the case that the owner is lost
    Round version;
    Payload value;
  };
  /// Describes the state that is held; nothing if there is none.
  [[nodiscard]] std::optional<Report> report() const;
  /// Workers whose push is missing while other workers' pushes wait.
  [[nodiscard]] std::vector<int> missing() const;

 private:
  /// Holds the slice's lock. After it has released the lock, lets other slices use the room that
  /// this slice has given back.
  class Work {
   public:
    explicit Work(ServedSlice& slice) : slice_(slice), lock_(slice.mutex_) {}
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    ~Work();

   private:
    ServedSlice& slice_;
    std::unique_lock<std::mutex> lock_;
  };

  // All methods below run under the lock.
  [[nodiscard]] bool isOriginal() const {
    return original_ && store_.installed();
  }
  [[nodiscard]] bool isCopy() const {
    return !original_ && store_.installed();
  }
  [[nodiscard]] bool isOwner() const {
    return place_.owner == context_.options().server;
  }
  void proceed();
  void advance();
  std::optional<SliceStore::AppliedUpdate> applyNext(const RuleBook& rules);
  void afterUpdate(const SliceStore::AppliedUpdate& update);
  void answerWhenAllowed();
  void becomeOriginal();
  void installOriginal(const FrameHeader& header, SliceState state);
  void passedOn(const FrameHeader& header);
  void passOn();
  void passPushesOn();

  const SliceContext context_;

  mutable std::mutex mutex_; // guards what follows
  SliceStore store_;
  bool original_ = false; // the held state is the original; else it is a copy
  std::uint32_t map_ = 0; // version of the map that `place_` is of
  SliceOwners place_{kNoServer, kNoServer};
  bool passesOn_ = false; // no worker sends here any more: later frames are for the owner
  StateReceiver states_;
  ReplicaFollower follower_;
  SliceReplication replication_;
  SliceAnswers answers_;
  SliceAdmission admission_;
};

} // namespace hvd_order
