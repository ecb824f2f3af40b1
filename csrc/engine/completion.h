#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// How far the exchange of a tensor has come.
enum class Stage : std::uint8_t {
  kUnderWay = 1,
  kEnqueued = 2, ///< under way, and a stream of its device can wait for the sum
  kEnded = 0,
};

/// The tensors whose exchange is under way, the threads that wait for them, and the engine's one
/// failure.
///
/// Exchanges of a tensor are counted. On a device the exchange of the next step may be announced
/// before this one has ended: the host runs ahead of the device.
///
/// Thread safety: every method locks `mutex_`; nothing else is called under it.
class Completion final {
 public:
  using Clock = std::chrono::steady_clock;

  void addModel(ModelId model, std::size_t tensors);
  void removeModel(ModelId model);

  /// Begins an exchange of `tensor`, whose gradient will be in its buffer soon.
  /// @throws the failure, if there is one.
  void announce(TensorKey tensor);
  /// Marks the gradient of `tensor` as being in its buffer; begins the exchange unless it was
  /// announced. @throws the failure, if there is one.
  void ready(TensorKey tensor, Clock::time_point now);
  /// Corrects the time of `ready`: the device has computed the gradient only now.
  void computed(TensorKey tensor);
  /// Marks the exchanges of `tensors` as enqueued on a device; wakes the threads that wait for
  /// that.
  void enqueue(const std::vector<TensorKey>& tensors);
  /// Marks the exchanges of `tensors` as ended; wakes their waiters and calls their functions.
  void complete(const std::vector<TensorKey>& tensors);

  /// Sets the failure; only the first call counts. All waiters wake with `error`.
  /// @return whether this was the first call.
  bool fail(const std::exception_ptr& error) noexcept;
  [[nodiscard]] bool failed() const;
  /// @throws the failure, if there is one.
  void check() const;

  /// Blocks until the newest exchange of `tensor` has come to `stage`: kEnqueued or kEnded. Returns
  /// at once if none is under way. @return whether it came there before the deadline.
  /// @throws the failure, if there is one.
  bool wait(TensorKey tensor, Clock::time_point deadline, Stage stage = Stage::kEnded);

  /// Called with null when the exchange has ended, else with the failure. Called under locks, so
  /// it may only pass the result on.
  using Then = std::function<void(const std::exception_ptr& error)>;
  /// Calls `then` once: when the newest exchange of `tensor` has ended, or with the failure; at
  /// once if the exchange is not under way. If the model is removed before, `then` is never called.
  void then(TensorKey tensor, Then then);

  /// Returns the stage of the newest exchange of each tensor of the model.
  /// @throws the failure, if there is one.
  [[nodiscard]] std::vector<std::uint8_t> stages(ModelId model) const;
  /// Returns for each tensor of the model when its gradient was in its buffer the last time.
  [[nodiscard]] std::vector<Clock::time_point> readyTimes(ModelId model) const;
  [[nodiscard]] bool isPending(TensorKey tensor) const;
  /// Whether all slices of an exchange that has not ended are enqueued on a device.
  [[nodiscard]] bool isEnqueued(TensorKey tensor) const;
  [[nodiscard]] std::size_t pendingCount() const;
  /// The models that have exchanges under way.
  [[nodiscard]] std::vector<ModelId> pendingModels() const;

 private:
  using Number = std::uint64_t;

  struct EndListener {
    Number exchange;
    Then then;
  };
  /// Numbers of exchanges that have come to each stage: announced >= ready >= enqueued >= ended,
  /// where nothing is enqueued on a device, enqueued == ended.
  struct TensorExchanges {
    Number announced = 0;
    Number ready = 0;
    Number enqueued = 0;
    Number ended = 0;
    Clock::time_point readyAt;
    std::vector<EndListener> listeners;
  };
  struct WaitingThread {
    TensorKey tensor;
    std::condition_variable moved;
  };

  [[nodiscard]] const TensorExchanges* find(TensorKey tensor) const;
  void begin(TensorKey tensor);
  void notify(TensorKey tensor);
  [[nodiscard]] bool reached(TensorKey tensor, Number exchange, Stage stage) const;

  mutable std::mutex mutex_;
  std::vector<std::vector<TensorExchanges>> models_; // by model and tensor
  std::vector<std::size_t> pendingOf_;               // exchanges under way, by model
  std::size_t pendingCount_ = 0;                     // their sum
  std::vector<WaitingThread*> waiters_; // linear search: more than one training thread is rare
  std::exception_ptr failure_;
};

} // namespace hvd_order
