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
#include "server/slice/held_slice.h"
#include "server/wire/peers.h"
#include "server/wire/routes.h"

namespace hvd_order {

class PushWindows;
class ServedModel;

/// One slice as a server has it: pushes come, updates are made, answers and copies go.
///
/// One server has the original of a slice. Its replica and, for a moment, those who had it before
/// have copies, and know whom theirs is a copy of. When that one is lost, the copy becomes the
/// original with the slice's owner by the map: here, or there after it has been sent. So a server
/// may be lost at any moment of a move. A copy that the map does not name is dropped once the owner
/// says that its replica has its own.
///
/// Where the delay of updates is bounded, a worker asks before it pushes. It is told to push when
/// it is its turn (delay_order.h), one worker at a time; or it gets the present value at once, and
/// its update counts as made, if that could not be applied in time. Several whose turns are next
/// may be told to push to a helper (aggregator.h), whose sum counts as all their updates. A worker
/// keeps its gradient until it has its answer, so whatever becomes of the helper, it is told again.
/// What has been asked is asked again of the new owner when a slice moves, so it need not move.
///
/// Thread safety: all methods may be called from any thread. Those that frames lead to throw
/// FrameError, and have done nothing then, if the frame does not fit.
class ServedSlice {
 public:
  ServedSlice(ServedModel& model, SliceIndex index);
  ServedSlice(const ServedSlice&) = delete;
  ServedSlice& operator=(const ServedSlice&) = delete;
  ~ServedSlice() = default;

  [[nodiscard]] std::tuple<SliceIndex, ModelId, std::uint32_t> key() const;

  // served_slice.cc: what workers send and get. `worker`: whose it is, as a server may pass on what
  // came to it too late.
  void push(Peer from, int worker, const FrameHeader& header, Payload payload);
  void pull(Peer from, int worker, const FrameHeader& header);
  void rulesCame();

  // slice_turns.cc: where workers ask first.
  void ask(int worker, const FrameHeader& header);
  /// The sum of several workers' updates, of a helper.
  void groupCame(Peer from, const FrameHeader& header, const Payload& payload);
  /// Some worker that this slice waits for has room for a push.
  void admit();
  /// That worker asks no more by an older map.
  void switched(int worker, std::uint32_t map);
  /// Workers have another layout of the model: nothing more comes.
  void retire();

  // slice_moves.cc: between servers.
  void stateCame(Peer from, const FrameHeader& header, Payload payload);
  /// An update that the original has made.
  void copyCame(Peer from, const FrameHeader& header, Payload payload);
  /// A copy has what was sent to it.
  void copyArrived(Peer from, const FrameHeader& header);
  /// @param begins the map is the model's first.
  void place(Placement place, std::uint32_t map, bool allSwitched, bool begins);
  void passOnFromNow();
  void serverGone(ServerId server);
  void settle();

  struct Report {
    bool owned; ///< else it is a copy for the case that its owner is lost
    Round version;
    Payload value;
  };
  /// What is held; none if nothing is.
  [[nodiscard]] std::optional<Report> report() const;
  /// The workers that those which have pushed wait for.
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
    std::uint64_t read; // steps that the worker's parameters had seen
    std::uint32_t map;
    bool isDirect; // has no line to some helper
  };
  // Pushes that are under way: one, or several to a helper.
  struct Admission {
    std::vector<Ask> asks;
    ServerId helper = Routes::kDirect;
    std::uint32_t group = 0; // its number
    double since = 0;
    [[nodiscard]] bool isOf(int worker) const;
  };
  // Whom a helper can answer to.
  struct Relay {
    ServerId helper;
    std::uint32_t group;
    std::vector<Member> members;
  };
  struct Unacknowledged {
    Round version;
    int worker; // whose update, of which round
    Round round;
    double change;
    bool isState; // the whole, not one update
  };
  struct Copied {
    Peer from;
    FrameHeader header;
    Payload sum;
    std::vector<Member> members;
  };
  using Parts = std::vector<std::optional<Payload>>;
  /// Holds the slice's lock; without it, at the end, lets other slices use the room that this one
  /// has given back.
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
  [[nodiscard]] std::uint32_t sizeBytes() const;
  [[nodiscard]] bool mayLag() const;
  [[nodiscard]] bool asksFirst() const;
  [[nodiscard]] std::uint64_t urgency() const;
  [[nodiscard]] std::uint64_t replicaUrgency() const;
  void send(Peer to, std::uint64_t urgency, const FrameHeader& header, Payload payload) const;

  // Under the lock, as all that follow. served_slice.cc:
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
  bool passesOn_ = false; // no worker sends here any more: what still comes is for the owner

  bool original_ = false;        // what is held counts; else it is a copy
  ServerId source_ = kNoServer;  // of the copy: who has the original
  std::uint32_t copyMap_ = 0;    // map by which the copy was made
  std::uint64_t safeBefore_ = 0; // by this map owner and replica have it
  std::vector<Copied> copies_;   // updates of the original whose rules are to come
  std::map<std::pair<Peer, bool>, Parts> incoming_; // states that are being received

  // Of the original:
  ServerId follower_ = kNoServer;              // who has the copy
  std::uint32_t copiedBy_ = 0;                 // by which map it was sent
  std::uint32_t originalMap_ = 0;              // by which map it came
  bool announced_ = false;                     // the follower suits the map
  std::vector<Answer> owed_;                   // pushes applied, or pulls, not answered yet
  std::vector<Unacknowledged> unacknowledged_; // what the follower may not have

  std::vector<Ask> asks_; // one of each worker at most
  std::optional<Admission> admission_;
  std::optional<Admission> arrived_; // the group that is to be applied
  std::optional<Relay> relay_;       // the group applied last, until its helper has had a word
  std::uint32_t groups_ = 0;         // so far
  std::vector<std::pair<PushWindows*, int>> freed_; // who has room again
};

} // namespace hvd_order
