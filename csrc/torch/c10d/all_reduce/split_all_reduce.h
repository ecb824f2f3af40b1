#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace hvd_order {

/// Memory for the parts of slices in flight on the CPU, used again and again: fresh memory costs
/// more than the copy into it.
class PartsPool : public std::enable_shared_from_this<PartsPool> {
 public:
  /// @return a tensor without defined contents. Its memory returns to the pool with its last user.
  at::Tensor take(std::int64_t elements, const at::TensorOptions& options);

 private:
  std::mutex mutex_; // guards what follows
  std::vector<at::Tensor> free_;
};

/// Copies contiguous elements, on the CPU with one thread: the operator would start a team of
/// threads for each thread that sends slices.
void copyInto(const at::Tensor& from, const at::Tensor& to);

/// Adds up `count` equally long parts, in order. 16-bit elements are added in float32 and rounded
/// once.
void sumParts(const at::Tensor& parts, int count, const at::Tensor& out);

/// How a back end carries the halves.
enum class HalfForm {
  kCollective, ///< its reduce-scatter, its all-gather
  kExchange,   ///< its all-to-all; a reduce-scatter then adds up on each rank
};

/// A sum or a half under way: once `work` has ended, `finish` does the rest on this rank, on the
/// current stream of the device.
struct StartedTransfer {
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> finish;
};

/// Leaves the sum of this rank's shard of `slice` in its place; the rest of the slice has no
/// defined contents. 16-bit elements that are exchanged are added in float32, in the order of the
/// ranks, and rounded once.
StartedTransfer
reduceScatter(c10d::Backend& backend, const at::Tensor& slice, HalfForm form, PartsPool& pool);

/// Fills `slice` with the shards of all ranks.
StartedTransfer
allGather(c10d::Backend& backend, const at::Tensor& slice, HalfForm form, PartsPool& pool);

} // namespace hvd_order
