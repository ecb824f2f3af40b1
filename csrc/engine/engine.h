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
#include "engine/enqueued_slices.h"
#include "engine/health.h"
#include "engine/shutdown_barrier.h"
#include "engine/timeline.h"
#include "engine/watch.h"
#include "scheduler/agreement_sequence.h"
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
  /// The job fails after this time without progress while gradients are under way.
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);
  /// A warning names the cause after this time without progress.
  std::chrono::nanoseconds stallWarning = std::chrono::minutes(1);
  /// Receives warnings, on the engine's thread; null: they go to standard error.
  std::function<void(const std::string&)> warn;
};

/// Sends ready slices in the agreed order, within the credit, and wakes the readers that wait.
///
/// Three kinds of threads decide and issue slices (see engine.cc): the engine's own thread, the
/// transport's thread that reports a slice done, and the control channel's thread that receives a
/// decision. There is one failure state. After the first error every waiter wakes with that error,
/// every later call throws it, and the other ranks are informed.
///
/// Thread safety: every method may be called from any thread. Create with `std::make_shared`. The
/// engine's thread keeps the engine alive until `shutdown`; callbacks of the transport hold it
/// weakly.
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

  /// Starts the engine's thread. The caller must also call `shutdown`.
  void start();

  /// Registers a model under an id that is free on every rank. All ranks use the same id.
  /// @throws the errors of Scheduler::addModel, or the engine's failure.
  void
  addModel(ModelId model, std::shared_ptr<const SliceLayout> layout, std::vector<SliceIndex> plan);
  void removeModel(ModelId model);

  /// Changes agreement, policy and credit. All ranks make the same call between the same two
  /// steps.
  /// @param lead see LinkReservation::retune.
  /// @throws InvalidUsage if the agreement changes while models are registered, and the errors of
  ///   Scheduler::retune.
  void retune(
      AgreementKind agreement,
      Policy policy,
      ByteCount creditBytes,
      std::chrono::nanoseconds lead);

  /// Stops issuing slices of a planned order, to leave it while gradients are under way. All ranks
  /// call it, tell each other the result, and call `endPlan` with the largest.
  /// @return the number of slices issued since the order was taken; none if no order is planned.
  std::optional<std::uint64_t> holdPlan();
  /// Same as AgreementSequence::endPlan.
  void endPlan(std::uint64_t issued, AgreementKind agreement, Policy policy);

  /// What has happened since the last call of `takeCounts`.
  struct AgreementCounts {
    std::uint64_t messages = 0; ///< of the agreement, sent by this rank
    std::uint64_t holdUps = 0;  ///< see Planned::takeHoldUps
  };
  AgreementCounts takeCounts();

  /// Announces that the gradient of `tensor` will be in its buffer soon. From now on `wait` waits
  /// for it. A call of `tensorReady` must follow.
  void announce(TensorKey tensor);

  /// Marks the gradient of `tensor` as being in its buffer (Scheduler::tensorReady); it is sent
  /// when its turn comes. While a device still carries the tensor's exchange of the step before,
  /// its turn cannot come.
  void tensorReady(TensorKey tensor);

  /// Same as Completion::computed.
  void computed(TensorKey tensor) {
    completion_.computed(tensor);
  }

  /// Blocks until the tensor's exchange has come to `stage`, at most until `deadline`.
  /// @return whether it has. @throws the engine's failure.
  bool wait(TensorKey tensor, Clock::time_point deadline, Stage stage = Stage::kEnded);
  /// Same as Completion::then. Unlike `wait` it ends no link reservation, because no thread is
  /// known to be idle.
  void then(TensorKey tensor, Completion::Then then);
  /// Same as Completion::stages.
  [[nodiscard]] std::vector<std::uint8_t> stages(ModelId model) const {
    return completion_.stages(model);
  }
  /// Same as Completion::readyTimes.
  [[nodiscard]] std::vector<Clock::time_point> readyTimes(ModelId model) const {
    return completion_.readyTimes(model);
  }
  /// @throws the engine's failure, if there is one.
  void check() const {
    completion_.check();
  }

  /// Same as `check`, for a wait that has run out of time while exchanges have stood still for
  /// nearly as long: the engine fails now, and its error names the gradients that are missing.
  void checkStalled();

  /// Puts the engine, and the engines of all other ranks, in the failure state.
  void fail(std::exception_ptr error);

  /// Blocks until nothing is under way or the engine has failed, at most until `deadline`.
  /// @return whether one of the two holds.
  bool drain(Clock::time_point deadline);
  /// Tells the other ranks that this rank wants to leave. Call `shutdown` once `mayLeave` is true.
  void enterShutdownBarrier();
  /// Blocks until every rank has finished the slices that this rank has finished, so that no rank
  /// needs it, or until the engine has failed; at most until `deadline`.
  /// @return whether one of the two holds.
  bool mayLeave(Clock::time_point deadline);
  /// Returns the ranks that `mayLeave` waits for. Blocks for rank 0's answer, at most until
  /// `deadline`.
  std::vector<Rank> awaited(Clock::time_point deadline);

  /// Tells the other ranks that this rank has left, and stops the thread. Exchanges under way end
  /// with an error. A second call has no effect. Must not be called from a callback of the engine.
  void shutdown() noexcept;

  [[nodiscard]] Timeline& timeline() {
    return timeline_;
  }

 private:
  void run();
  void drive(std::unique_lock<std::mutex>& lock);
  void act(const Decisions& decisions, std::uint32_t agreementNumber);
  void sliceEnqueued(SliceKey slice);
  void sliceDone(SliceKey slice, std::exception_ptr error);
  bool offer(TensorKey tensor, Clock::time_point now);
  void onMessage(Rank from, const ControlMessage& message);
  std::vector<Health::Addressed> handle(Rank from, const ControlMessage& message);
  void onLost(Rank peer, const std::exception_ptr& error);
  void transferFailed(std::exception_ptr error);
  bool setFailure(const std::exception_ptr& error, bool informOthers = true);
  void failStalled();
  void sendFailure(const std::exception_ptr& error);
  void sendToOthers(const ControlMessage& message);
  void sendAll(const std::vector<Health::Addressed>& messages);
  void reservationChanged();
  void lookAround(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] Agreement& agreement() const {
    return agreements_.current();
  }
  [[nodiscard]] std::string stallReport() const;
  void wake();
  void alarm();

  const EngineOptions options_;
  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<ControlChannel> control_;
  Completion completion_;
  Timeline timeline_;

  // Guards all members below. Taken before the locks of Completion and Timeline, never after. No
  // method of the transport or the control channel is called under it.
  std::mutex mutex_;
  std::condition_variable wakeUp_;
  AgreementSequence agreements_;
  std::uint64_t messages_ = 0; // of the agreement, sent since takeCounts
  EnqueuedSlices enqueued_;
  std::vector<TensorKey> earlyTensors_; // ready, while the exchange before is still on the device
  bool dirty_ = false;                  // an event has happened since the last decision
  bool alarmed_ = false; // the engine's thread must check for failures and its wake-up time
  bool driving_ = false; // a thread is deciding and issuing; it alone uses decisions_
  bool stop_ = false;
  Decisions decisions_;

  LinkReservation reservation_;
  std::atomic<bool> reserved_ = false; // copy of the reservation's state, read without the lock

  Health health_;
  StallWatch watch_;
  std::exception_ptr failureToSend_; // of this rank; the other ranks do not know it yet
  std::set<Rank> gone_;              // ranks that shut down or are lost; nothing is sent to them

  ShutdownBarrier barrier_;
  std::condition_variable partingChanged_; // for threads in drain, mayLeave or awaited

  std::thread thread_;
};

} // namespace hvd_order
