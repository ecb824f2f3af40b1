#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "server/admission/delay_order.h"
#include "server/admission/push_windows.h"
#include "server/admission/routes.h"
#include "server/slice/held_slice.h"
#include "server/wire/peers.h"

namespace hvd_order {

class ServedModel;

/// One slice as a server has it: receives pushes, makes updates, and sends answers and copies.
///
/// One server has the original of a slice. Its replica has a copy, and so, for a moment, do the
/// servers that had the slice before. Each copy stores which server has its original. When that
/// server is lost, the copy becomes the original at the slice's owner by the map: either here, or
/// at the owner after the copy has been sent there. So a server may be lost at any moment of a
/// move. A copy that the map does not name is dropped once the owner announces that its replica
/// has its own copy.
///
/// Where the delay of updates is bounded, a worker asks before it pushes. The server admits one
/// worker at a time, in the order of delay_order.h. If the update could not be applied in time,
/// the worker instead receives the present value at once, and its update counts as made. Several
/// workers whose turns are next may be told to push to a helper (aggregator.h), whose sum counts
/// as all their updates. A worker keeps its gradient until it has its answer, so it can be
/// admitted again if the helper fails. When a slice moves, workers ask the new owner again, so
/// requests do not move with the slice.
///
/// Thread safety: all methods may be called from any thread. Methods that handle frames throw
/// FrameError if the frame does not fit, and have changed nothing then.
class ServedSlice final : public PushWindows::Waiter {
 public:
  ServedSlice(ServedModel& model, SliceIndex index);

  // served_slice.cc: frames from and to workers. `worker` is the rank whose push or pull it is: a
  // server may pass on a frame that came to it too late.
  void push(Peer from, int worker, const FrameHeader& header, Payload payload);
  void pull(Peer from, int worker, const FrameHeader& header);
  void rulesCame();

  // slice_turns.cc: for workers that ask before they push.
  void ask(int worker, const FrameHeader& header);
  /// Handles a helper's sum of several workers' updates.
  void groupCame(Peer from, const FrameHeader& header, const Payload& payload);
  void admit() override;
  /// The worker sends no more requests by an older map.
  void switched(int worker, std::uint32_t map);
  /// All workers have a newer layout of the model: no more frames come.
  void retire();

  // slice_moves.cc: between servers.
  void stateCame(Peer from, const FrameHeader& header, Payload payload);
  /// Handles an update that the original has made.
  void copyCame(Peer from, const FrameHeader& header, Payload payload);
  /// Handles the acknowledgement of a copy.
  void copyArrived(Peer from, const FrameHeader& header);
  /// @param begins the map is the model's first.
  void place(Placement place, std::uint32_t map, bool allSwitched, bool begins);
  void passOnFromNow();
  void serverGone(ServerId server);
  void settle();

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
  struct Answer {
    int worker;
    Round round;
    std::uint32_t part;
  };
  struct Ask {
    int worker;
    Round round;
    std::uint64_t read; // steps that the worker's parameters include
    std::uint32_t map;
    bool isDirect; // the worker has no connection to the helper it was given
  };
  // Admitted pushes: one to this server, or several to a helper.
  struct Admission {
    std::vector<Ask> asks;
    ServerId helper = Routes::kDirect;
    std::uint32_t group = 0; // its number
    double since = 0;
    [[nodiscard]] bool isOf(int worker) const;
  };
  // A group that a helper can answer.
  struct Relay {
    ServerId helper;
    std::uint32_t group;
    std::vector<Member> members;
  };
  struct Unacknowledged {
    Round version;
    int worker; // the update's worker and round
    Round round;
    double change;
    bool isState; // a whole state, not one update
  };
  struct Copied {
    Peer from;
    FrameHeader header;
    Payload sum;
    std::vector<Member> members;
  };
  using Parts = std::vector<std::optional<Payload>>;
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

  [[nodiscard]] bool isOriginal() const {
    return original_ && held_.installed();
  }
  [[nodiscard]] bool isCopy() const {
    return !original_ && held_.installed();
  }
  [[nodiscard]] PushWindows::Key key() const;
  [[nodiscard]] std::uint32_t sizeBytes() const;
  [[nodiscard]] bool mayLag() const;
  [[nodiscard]] bool asksFirst() const;
  [[nodiscard]] std::uint64_t urgency() const;
  [[nodiscard]] std::uint64_t replicaUrgency() const;
  void send(Peer to, std::uint64_t urgency, const FrameHeader& header, Payload payload) const;

  // All methods below run under the lock. served_slice.cc:
  void advance();
  void afterUpdate(const HeldSlice::Update& update);
  void answerWhenAllowed();
  [[nodiscard]] bool mayBeAnswered(int worker, Round round) const;
  void answer(const Answer& to);
  void answerByHelper();
  void tellHelper(ServerId helper, std::uint32_t group, Payload answer) const;
  void dropGroup();

  // slice_turns.cc:
  void admitNext();
  [[nodiscard]] std::vector<WaitingUpdate> waitingUpdates() const;
  void admitOneOf(const std::vector<std::size_t>& candidates);
  bool admitGroup(const std::vector<WaitingUpdate>& updates);
  void endAdmission(bool came);
  void giveUpAdmission();
  void askAgain(const std::vector<Ask>& asks);

  // slice_moves.cc:
  void settleNow();
  void becomeOriginal();
  void passedOn(const FrameHeader& header);
  void copyToReplica();
  void sayItIsSafe();
  void passOn();
  void sendState(ServerId to, std::uint64_t urgency, std::uint64_t mark);
  [[nodiscard]] std::optional<SliceState>
  takePart(Peer from, const FrameHeader& header, Payload payload);
  void installOriginal(const FrameHeader& header, SliceState state);
  void installCopy(Peer from, const FrameHeader& header, SliceState state);
  void followCopies();

  ServedModel& model_;
  const SliceIndex index_;

  mutable std::mutex mutex_; // guards what follows
  HeldSlice held_;
  std::uint32_t map_ = 0; // version of the map that `place_` is of
  Placement place_{kNoServer, kNoServer};
  bool passesOn_ = false; // no worker sends here any more: later frames are for the owner

  bool original_ = false;        // the held state is the original; else it is a copy
  ServerId source_ = kNoServer;  // of a copy: the server that has the original
  std::uint32_t copyMap_ = 0;    // map by which the copy was made
  std::uint64_t safeBefore_ = 0; // copies of older maps may go: owner and replica have the slice
  std::vector<Copied> copies_;   // updates of the original that wait for their rules
  std::map<std::pair<Peer, bool>, Parts> incoming_; // states that are being received

  // For the original only:
  ServerId follower_ = kNoServer;              // the server that has the copy
  std::uint32_t copiedBy_ = 0;                 // version of the map by which the copy was sent
  std::uint32_t originalMap_ = 0;              // version of the map by which the original came
  bool announced_ = false;                     // the follower is the one that the map names
  std::vector<Answer> owed_;                   // applied pushes, and pulls, without an answer yet
  std::vector<Unacknowledged> unacknowledged_; // states and updates that the follower may not have

  std::vector<Ask> asks_; // at most one per worker
  std::optional<Admission> admission_;
  std::optional<Admission> arrived_; // the group whose sum waits to be applied
  std::optional<Relay> relay_;       // the group applied last, until its helper has a reply
  std::uint32_t groups_ = 0;         // number of groups so far
  std::vector<std::pair<PushWindows*, int>> freed_; // senders that have room again
};

} // namespace hvd_order
