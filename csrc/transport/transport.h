#pragma once

#include <exception>
#include <functional>
#include <string>

#include "base/types.h"
#include "scheduler/slice_layout.h"

namespace hvd_order {

/// Adapter to an engine that moves bytes. It knows the gradient buffers of every model.
class Transport {
 public:
  /// Called exactly once for each issued slice, from any thread: null on success.
  using Done = std::function<void(std::exception_ptr error)>;

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  /// Starts summing the slice over all ranks, in place. Does not block on the network. All ranks
  /// issue the same slices in the same order; one thread at a time calls this.
  /// @throws anything: the slice then counts as failed and `done` is not called.
  virtual void issue(SliceKey key, const Slice& slice, Done done) = 0;

  /// Nothing moves: finds out who is to blame, if the transport can. Must not block.
  virtual void inquire() {}
  /// What is known of that, in words; empty: nothing.
  [[nodiscard]] virtual std::string report() const {
    return {};
  }

  /// Gives up on everything in flight as far as the backend can. Must not block.
  virtual void abort() noexcept = 0;
};

} // namespace hvd_order
