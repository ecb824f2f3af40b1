#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "engine/completion.h"
#include "engine/farewell.h"
#include "engine/health.h"
#include "engine/timeline.h"
#include "scheduler/agreement.h"
#include "scheduler/link_reservation.h"
#include "transport/control_channel.h"
#include "transport/transport.h"

namespace hvd_order {

struct EngineOptions {
  Rank rank = 0;
  int size = 1;
  AgreementKind agreement = AgreementKind::kLeader;
  Policy policy = Policy::kPriority;
  ByteCount creditBytes = 8 << 20;
  /// Without any progress for this long while gradients are under way, the job fails.
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);
  /// Without any progress for this long, a warning says who is to blame.
  std::chrono::nanoseconds stallWarning = std::chrono::minutes(1);
  /// Takes warnings, from the engine's thread; null: standard error.
  std::function<void(const std::string&)> warn;
};

/// Moves ready slices in the agreed order, within the credit, and tells who waits.
///
/// Slices are decided and issued by its own thread, by the thread of the transport that reports one
/// done, or by that of the control channel that hears of a decision (see engine.cc). There is one
/// failure state: after the first error every waiter wakes with that error, every later call throws
/// it, and the other ranks are told.
///
/// Thread safety: every method may be called from any thread. Create with `std::make_shared`. The
/// engine's thread keeps it alive until `shutdown`; callbacks of the transport hold it weakly.
class Engine final : public std::enable_shared_from_this<Engine> {
 public:
  using Clock = Completion::Clock;

  /// @param control may be null when size is 1.
  Engine(
      EngineOptions options,
      std::shared_ptr<Transport> transport,
      std::shared_ptr<ControlChannel> control);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts the engine's thread. Whoever starts an engine also shuts it down.
  void start();

  /// Registers a model under an id that is free on every rank; all ranks choose the same.
  /// @throws as Scheduler::addModel, or the engine's failure.
  void
  addModel(ModelId model, std::shared_ptr<const SliceLayout> layout, std::vector<SliceIndex> plan);
  void removeModel(ModelId model);

  /// As Scheduler::retune. Every rank does the same between the same two steps.
  /// @param lead as LinkReservation::retune.
  void retune(Policy policy, ByteCount creditBytes, std::chrono::nanoseconds lead);

  /// The gradient of `tensor` is on its way to its buffer: from now on `wait` waits for it, and
  /// `tensorReady` will follow.
  void announce(TensorKey tensor);

  /// The gradient of `tensor` lies in its buffer: send it when its turn comes.
  void tensorReady(TensorKey tensor);

  /// Blocks until the tensor is summed over all ranks, at most until `deadline`.
  /// @return whether it is. @throws the engine's failure.
  bool wait(TensorKey tensor, Clock::time_point deadline);
  /// As Completion::then. Unlike `wait` it ends no reservation: nobody is known to be idle.
  void then(TensorKey tensor, Completion::Then then);
  /// For each tensor of the model, 1 while it is being exchanged. @throws the engine's failure.
  [[nodiscard]] std::vector<std::uint8_t> pending(ModelId model) const {
    return completion_.pending(model);
  }
  /// @throws the engine's failure, if there is one.
  void check() const {
    completion_.check();
  }

  /// Puts the engine, and the engines of all other ranks, in the failure state.
  void fail(std::exception_ptr error);

  /// Blocks until nothing is under way or the engine has failed, at most until `deadline`.
  /// @return whether that is so.
  bool drain(Clock::time_point deadline);
  /// Tells the others that this rank wants to leave. `shutdown` may follow when `mayLeave` is true.
  void beginFarewell();
  /// Blocks until every rank has finished the slices that this one has, so that nobody needs it any
  /// more, or the engine has failed; at most until `deadline`. @return whether that is so.
  bool mayLeave(Clock::time_point deadline);
  /// The ranks that `mayLeave` waits for; blocks for the answer, at most until `deadline`.
  std::vector<Rank> awaited(Clock::time_point deadline);

  /// Tells the others in peace and stops the thread. What is still under way ends with an error.
  /// Harmless when called twice. Not from a callback of the engine.
  void shutdown() noexcept;

  [[nodiscard]] Timeline& timeline() {
    return timeline_;
  }

 private:
  void run();
  void drive(std::unique_lock<std::mutex>& lock);
  void act(const Decisions& decisions);
  void sliceDone(SliceKey slice, std::exception_ptr error);
  void onMessage(Rank from, const ControlMessage& message);
  std::vector<Health::Addressed> handle(Rank from, const ControlMessage& message);
  void onLost(Rank peer, const std::exception_ptr& error);
  void suspect(std::exception_ptr error);
  void tellOthers(const ControlMessage& message);
  void sendAll(const std::vector<Health::Addressed>& messages);
  void reservationChanged();
  void watch(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] std::string stallReport() const;
  [[nodiscard]] Clock::time_point nextWatch() const;
  [[nodiscard]] std::vector<TensorKey> waitingTensors() const;
  [[nodiscard]] bool isStranded() const;
  [[nodiscard]] Clock::time_point strandedAt() const;
  [[nodiscard]] std::exception_ptr strandedError() const;
  [[nodiscard]] std::exception_ptr withoutCulprit(const std::exception_ptr& error) const;
  void wake();
  void alarm();
  void progress();

  const EngineOptions options_;
  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<ControlChannel> control_;
  Completion completion_;
  Timeline timeline_;

  // Guards all below. Taken before Completion's and Timeline's own locks, never after; nothing of
  // the transport or the control channel is called under it.
  std::mutex mutex_;
  std::condition_variable wakeUp_;
  std::unique_ptr<Agreement> agreement_;
  std::set<ModelId> models_;
  bool dirty_ = false;   // something happened since the last decision
  bool alarmed_ = false; // the engine's thread has to look: at a failure, or when to wake
  bool driving_ = false; // a thread is deciding and issuing; it alone uses decisions_
  bool stop_ = false;
  Decisions decisions_;

  LinkReservation reservation_;
  std::atomic<bool> reserved_ = false; // as reservation_, for those who have no lock

  Health health_;
  Clock::time_point lastProgress_;
  bool asked_ = false;  // in this stall, the other ranks have been asked
  bool warned_ = false; // in this stall, a warning has been given

  // A transfer failed, and the control channel may say in a moment which rank is to blame.
  std::exception_ptr suspicion_;
  Clock::time_point suspicionEnds_;
  std::exception_ptr untold_; // a failure that the other ranks have not heard of
  std::set<Rank> gone_;       // ranks that shut down or are lost; nothing is sent to them

  Farewell farewell_;
  std::condition_variable partingChanged_; // somebody waits in drain, mayLeave or awaited
  std::optional<Rank> left_;               // the first rank that shut down in peace
  Clock::time_point leftAt_;

  std::thread thread_;
};

} // namespace hvd_order
