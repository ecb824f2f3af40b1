#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "torch/c10d/shard.h"
#include "torch/cuda/kernel_table.h"

namespace hvd_order {

/// Neighbouring elements of a slice that travel in one format.
struct CodedRange {
  std::int64_t begin;
  std::int64_t count;
  WireFormat format;
};

/// Where the elements of one shard of a slice lie in a message: first those that travel as they
/// are, then the scales of blocks, then 16-bit elements, then codes.
class MessageLayout final {
 public:
  /// @param ranges of the slice, in order.
  /// @throws InvalidUsage for elements that have no codes.
  MessageLayout(const std::vector<CodedRange>& ranges, Shard shard, std::int64_t elementBytes);

  /// Length of the message, a multiple of 16.
  [[nodiscard]] std::int64_t bytes() const {
    return bytes_;
  }

  /// Adds the runs of a message at `message`.
  /// @param values, residual first element of the slice; `residual` may be null.
  void addRuns(std::vector<CodedRun>& runs, std::byte* values, float* residual, std::byte* message)
      const;

 private:
  struct PlacedRange {
    CodedRange range;
    std::int64_t scales; ///< offsets in the message
    std::int64_t codes;
  };

  std::int64_t elementBytes_;
  std::vector<PlacedRange> runs_;
  std::int64_t bytes_ = 0;
};

/// How one slice travels: a message for each shard, and what this rank still owes to the sum of
/// each element.
///
/// Safe to share between threads, but for what `residual` holds and where said.
struct SliceCoding {
  std::vector<MessageLayout> shards; ///< by rank
  at::Tensor residual;               ///< float32, one for each element; undefined: none
  /// Whether another rank may encode elements for which this rank's residual is not zero. Of the
  /// slice's transfer, of which there is one at a time.
  mutable bool addsDebts = true;
};

/// @param ranges of the slice, in order. @param size number of ranks.
SliceCoding codingOf(
    const std::vector<CodedRange>& ranges,
    const at::Tensor& slice,
    at::Tensor residual,
    int size);

/// Turns shards of a slice into messages, or messages into shards, on the current stream of its
/// device.
class SliceCoder final {
 public:
  SliceCoder(const at::Tensor& slice, const SliceCoding& coding);
  /// Adds a shard, and the message at `message` that it becomes or comes from.
  void add(std::size_t shard, std::byte* message);
  /// Encodes what was added. @param writesBack whether the values become those of the message.
  /// @throws InvalidUsage if the device has no kernels, DeviceFailed if they cannot be launched.
  void encode(bool writesBack) const;
  /// Adds up the messages of all senders, of which the first has been added. @throws as `encode`.
  void decode(Senders senders) const;

 private:
  template <typename OnHost, typename Launch>
  void run(const OnHost& onHost, const Launch& launch) const;

  at::Tensor slice_;
  const SliceCoding& coding_;
  std::vector<CodedRun> runs_;
};

} // namespace hvd_order
