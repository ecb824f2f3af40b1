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

/// Gradients of one model for those who hand in memory and want to be called back, as operators of
/// a framework do: `post` copies a gradient into its place and returns, `take` gives the sum back.
///
/// Each position is posted and taken in turn. Sums are handed out by a thread of its own, since
/// copying them on the transport's would hold up the next slice. A round is one post of every
/// position; a rank without gradients takes part in the others' rounds with `standIn`.
///
/// Thread safety: every method may be called from any thread. Create with `create`; whoever creates
/// one also closes it.
class OpGradientQueue final : public std::enable_shared_from_this<OpGradientQueue> {
 public:
  /// A tensor of the model and its part of the gradient buffer, which must outlive `close`.
  struct Place {
    TensorId tensor;
    std::byte* memory;
    std::size_t sizeBytes;
    std::string name;
  };

  /// Gets a sum. `receive` may be left out after an error; `finish` is called exactly once, last.
  class Taker {
   public:
    virtual ~Taker() = default;
    /// The sum, to be copied: it is gone when this returns.
    virtual void receive(const std::byte* sum, std::size_t sizeBytes) = 0;
    /// @param error null if `receive` was called. The position may be posted again from here on.
    virtual void finish(const std::exception_ptr& error) = 0;
  };

  static std::shared_ptr<OpGradientQueue>
  create(std::shared_ptr<Engine> engine, ModelId model, std::vector<Place> places);
  OpGradientQueue(const OpGradientQueue&) = delete;
  OpGradientQueue& operator=(const OpGradientQueue&) = delete;

  /// Copies the gradient of a position into its place and marks it ready.
  /// @throws InvalidUsage if there is no such position, the size differs, or the last sum has not
  /// been
  ///   taken; the engine's failure.
  void post(std::size_t position, const void* gradient, std::size_t sizeBytes);

  /// Has the taker called when the sum of what was posted is there, or with the reason why not.
  void take(std::size_t position, std::unique_ptr<Taker> taker);

  /// Sees to it that every position is posted `round` times in all: what lacks is posted as zeros,
  /// whose sums nobody gets. Does not wait: a position that is under way follows when it is back.
  /// What was posted and not taken is not to be taken any more.
  /// @throws InvalidUsage after `close`; the engine's failure.
  void standIn(std::uint64_t round);
  /// How often the position that is furthest ahead was posted, or is to be by `standIn`.
  [[nodiscard]] std::uint64_t rounds() const;
  /// Blocks until there are more than `known` rounds. @return how many; none after `close`.
  [[nodiscard]] std::optional<std::uint64_t> waitForRound(std::uint64_t known);
  /// Blocks until all that was taken has been received and all zeros are back, or `close`.
  void waitUntilIdle();

  /// Ends all that is under way with an error. Harmless when called twice. Not from a taker.
  void close() noexcept;

  /// How often `post` has succeeded.
  [[nodiscard]] std::uint64_t posts() const;

 private:
  struct Position {
    Place place;
    bool posted = false; // from `post` until the sum has been received
    std::unique_ptr<Taker> taker;
    std::uint64_t rounds = 0; // posts so far, of zeros as well
    std::uint64_t wanted = 0; // how many there have to be, by zeros if need be
  };
  struct Settled {
    std::size_t position;
    std::exception_ptr error;
  };

  OpGradientQueue(std::shared_ptr<Engine> engine, ModelId model, std::vector<Place> places);
  TensorId accept(std::size_t position, std::unique_ptr<Taker>& taker);
  void listen(std::size_t position, TensorId tensor);
  void begin(Position& position);
  void sendZeros(std::size_t position);
  void settled(std::size_t position, const std::exception_ptr& error);
  void run();
  void deliver(std::unique_lock<std::mutex>& lock, const Settled& settled);

  const std::shared_ptr<Engine> engine_;
  const ModelId model_;

  // Guards all below. Taken after the engine's locks, never before; takers are called without it.
  mutable std::mutex mutex_;
  std::condition_variable wakeUp_;  // of the thread
  std::condition_variable changed_; // of who waits for a round, or for the end of all
  std::vector<Position> positions_;
  std::deque<Settled> settled_;
  std::uint64_t posts_ = 0;
  std::uint64_t rounds_ = 0;
  bool closed_ = false;
  std::thread thread_; // keeps this alive until `close`
};

} // namespace hvd_order
