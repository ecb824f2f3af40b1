#pragma once

#include <exception>
#include <functional>
#include <string>

#include "base/types.h"
#include "scheduler/slice_layout.h"

namespace hvd_order {

/// Adapter from the engine to a communication library. It has the gradient buffers of every model.
class Transport {
 public:
  /// Called exactly once for each issued slice, from any thread, with null on success.
  using Done = std::function<void(std::exception_ptr error)>;
  using Enqueued = std::function<void(SliceKey slice)>;

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  /// Starts to sum the slice over all ranks, in place, or a half of that (Slice::operation): after
  /// a reduce-scatter only this rank's shard of the slice is defined. Does not block on the
  /// network. All ranks issue the same slices in the same order; one thread at a time calls this.
  /// @throws any exception: the slice then counts as failed, and `done` must not be called.
  virtual void issue(SliceKey key, const Slice& slice, Done done) = 0;

  /// From now on calls `enqueued` for each slice that a device's stream carries, before `done`,
  /// once another stream can wait for the sum. Most transports know no streams.
  virtual void onEnqueued(const Enqueued& /*enqueued*/) {}

  /// Called in a stall: starts to look for its cause, if the transport can. Must not block.
  virtual void inquire() {}
  /// Returns the cause of the stall in words; empty if unknown.
  [[nodiscard]] virtual std::string report() const {
    return {};
  }

  /// Cancels all transfers in flight, as far as the library can. Blocks for a few seconds at most.
  virtual void abort() noexcept = 0;
};

} // namespace hvd_order
