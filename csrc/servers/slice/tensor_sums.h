#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "servers/slice/slice_store.h"

namespace hvd_order {

/// Sums over all workers of tensors that belong to no model; the workers name each tensor.
///
/// Thread safety: all methods may be called from any thread.
class TensorSums {
 public:
  explicit TensorSums(int workers) : workers_(workers) {}

  /// Adds a worker's tensor.
  /// @return the sum once every worker's tensor has come.
  /// @throws FrameError if the tensor is malformed, or unlike the other workers'.
  std::optional<Payload> add(int worker, std::uint64_t name, std::uint32_t type, Payload tensor);

 private:
  static constexpr std::size_t kMost = 4096; // at a time

  struct OpenSum {
    SliceShape shape;
    std::unique_ptr<SliceStore> store;
  };

  const int workers_;
  std::mutex mutex_; // guards what follows
  std::map<std::uint64_t, OpenSum> sums_;
};

} // namespace hvd_order
