#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace hvd_order {

/// The gradients of one model, for operators of a framework that pass memory and expect a
/// callback. `post` copies a gradient into its place and returns; `take` delivers the sum to a
/// taker.
///
/// At each position, `post` and `take` alternate. The queue's own thread delivers the sums,
/// because copying them on the transport's thread would delay the next slice. A pass is one post
/// of every position. A rank without gradients takes part in the passes of the other ranks with
/// `standIn`.
///
/// Thread safety: every method may be called from any thread. Create with `create`; the creator
/// must call `close`.
class OpGradientQueue final : public std::enable_shared_from_this<OpGradientQueue> {
 public:
  /// A tensor of the model and its part of the gradient buffer; the buffer must outlive `close`.
  struct Place {
    TensorId tensor;
    std::byte* memory;
    std::size_t sizeBytes;
    std::string name;
  };

  /// Receives a sum. `finish` is called exactly once, last. After an error `receive` may not be
  /// called.
  class Taker {
   public:
    virtual ~Taker() = default;
    /// @param sum valid only until this returns, so it must be copied.
    virtual void receive(const std::byte* sum, std::size_t sizeBytes) = 0;
    /// @param error null if `receive` succeeded. From this call on the position may be posted
    /// again.
    virtual void finish(const std::exception_ptr& error) = 0;
  };

  /// @param squares the tensor of the squares, if the layout is split; the queue sends them.
  static std::shared_ptr<OpGradientQueue> create(
      std::shared_ptr<Engine> engine,
      ModelId model,
      std::vector<Place> places,
      std::optional<TensorId> squares = std::nullopt);
  OpGradientQueue(const OpGradientQueue&) = delete;
  OpGradientQueue& operator=(const OpGradientQueue&) = delete;

  /// Copies the gradient of a position into its place and marks it ready.
  /// @throws InvalidUsage if there is no such position, the size differs, or the last sum has not
  ///   been taken; the engine's failure.
  void post(std::size_t position, const void* gradient, std::size_t sizeBytes);

  /// Calls the taker when the sum of the posted gradient has arrived, or with an error.
  void take(std::size_t position, std::unique_ptr<Taker> taker);

  /// Ensures that every position is posted `pass` times in all. Missing posts are zeros, whose
  /// sums are dropped. Does not wait: a position that is under way follows when its sum has
  /// arrived. Gradients that were posted but not taken can no longer be taken.
  /// @throws InvalidUsage after `close`; the engine's failure.
  void standIn(std::uint64_t pass);
  /// Number of posts of the position that is furthest ahead, including posts due by `standIn`.
  [[nodiscard]] std::uint64_t passes() const;
  /// Blocks until there are more than `known` passes. @return their number; none after `close`.
  [[nodiscard]] std::optional<std::uint64_t> waitForPass(std::uint64_t known);
  /// Blocks until all sums, also those of zeros, have been delivered, or until `close`.
  void waitUntilIdle();

  /// Ends all exchanges under way with an error. A second call has no effect. Must not be called
  /// from a taker.
  void close() noexcept;

  /// Number of successful calls of `post`.
  [[nodiscard]] std::uint64_t posts() const;

 private:
  struct Position {
    Place place;
    bool posted = false; // from `post` until the sum has been delivered
    bool taken = false;  // a taker has been given
    std::unique_ptr<Taker> taker;
    std::uint64_t passes = 0; // posts so far, including zeros
    std::uint64_t wanted = 0; // posts required, with zeros if necessary
  };
  struct EndedExchange {
    std::size_t position;
    std::exception_ptr error;
  };

  OpGradientQueue(
      std::shared_ptr<Engine> engine,
      ModelId model,
      std::vector<Place> places,
      std::optional<TensorId> squares);
  TensorId accept(std::size_t position, std::unique_ptr<Taker>& taker);
  void listen(std::size_t position, TensorId tensor);
  void begin(Position& position, std::unique_ptr<Taker> taker);
  bool beginSquares();
  void send(std::size_t position);
  void sendZeros(std::size_t position);
  void ended(std::size_t position, const std::exception_ptr& error);
  void run();
  void deliver(std::unique_lock<std::mutex>& lock, const EndedExchange& ended);

  const std::shared_ptr<Engine> engine_;
  const ModelId model_;
  const std::size_t gradients_; // number of positions that are posted and taken

  // Guards all members below. Taken after the engine's locks, never before. Takers are called
  // without it.
  mutable std::mutex mutex_;
  std::condition_variable wakeUp_;  // for the queue's thread
  std::condition_variable changed_; // for waitForPass and waitUntilIdle
  std::vector<Position> positions_;
  std::deque<EndedExchange> ended_;
  std::vector<TensorKey> held_; // ready, once the squares of the pass before are done
  std::uint64_t posts_ = 0;
  std::uint64_t passes_ = 0;
  bool closed_ = false;
  std::thread thread_; // keeps this object alive until `close`
};

} // namespace hvd_order
