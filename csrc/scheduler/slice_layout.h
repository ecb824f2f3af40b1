#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// A tensor's name, and its size in gradient buffer number `buffer`.
struct TensorSpec {
  std::string name;
  ByteCount sizeBytes;
  BufferId buffer;
};

/// What the transfer of a slice does.
enum class Operation : std::uint8_t {
  kAllReduce,
  kReduceScatter, ///< the first half of a split all-reduce: each rank gets the sum of its shard
  kAllGather,     ///< the second half: all ranks get all shards
};

/// Contiguous byte range of a gradient buffer: the unit of transfer.
///
/// Covers the tensors `firstTensor..lastTensor` of its buffer, or a part of one tensor. Ids are in
/// consumption order; ids of tensors in other buffers may lie between them.
struct Slice {
  BufferId buffer;
  ByteCount offsetBytes;
  ByteCount sizeBytes;
  TensorId firstTensor;
  TensorId lastTensor;
  Operation operation = Operation::kAllReduce;
};

/// Places of all tensors in their gradient buffers, and the cut of the buffers into slices.
///
/// Tensors lie in their buffer in consumption order. Neighbouring whole tensors share a slice
/// while they fit `sliceBytes` (fusion). A larger tensor has slices of its own, as equal as
/// alignment allows (partitioning). So no slice waits both for the tail of a large tensor and for
/// a small tensor. Slices are numbered by their first tensor.
///
/// The tensors consumed first are produced last and are needed at once; they must not wait for
/// neighbours that are needed later. With a small front, a fused slice is therefore no longer than
/// the bytes before it in the buffer, but may always have an eighth of `sliceBytes`. Where nothing
/// is needed before all gradients have arrived, fewer slices cost less: without a small front,
/// slices are filled from the end of the buffer, in the order in which gradients are produced.
///
/// A *split* layout sends each of these byte ranges twice: as a reduce-scatter, and then as an
/// all-gather. Between them go the *squares*: one more tensor, the last, in a buffer of its own. It
/// has one float64 for each pair of a reduce-scatter and a tensor that it carries, the sum of
/// squares of the tensor's part in this rank's shard, and is sent once all reduce-scatters are
/// done. So all ranks know the norms of the sums before these have arrived. Slice 0 is the squares,
/// then come the reduce-scatters and then the all-gathers, each in consumption order: what the
/// norms wait for goes first. Where nobody waits for norms, halves go *by need*: both halves of
/// what is consumed first before those of what is consumed later.
///
/// In a *sharded* layout each rank updates the parameters of its shards between the halves, so the
/// all-gathers carry parameters. Each parameter is a tensor of its own, in the place of its
/// gradient; its all-gathers wait for it, and not for their reduce-scatters. The squares have a
/// second float64 for each pair: the square of the tensor's use flag, if that lies in the shard.
///
/// Behind these the squares may have *maxima*: for each rank, one float64 for each gradient, the
/// largest absolute value in the rank's shards of it. Each rank writes its own, and zeros for the
/// others, so the sum over the ranks tells all of them to all ranks.
///
/// Immutable, hence safe to share between threads.
class SliceLayout final {
 public:
  /// Slices of one tensor are cut at multiples of this size, so that no element is split.
  static constexpr ByteCount kCutAlignment = 64;

  /// @param tensors in consumption order; every size must be a positive multiple of 16 bytes, so
  ///   that each tensor starts aligned for every dtype (complex128 is the widest).
  /// @param smallFront whether slices at the front of a buffer are shorter.
  /// @param split whether all-reduces are split.
  /// @param sharded whether parameters travel in the second half; only if split.
  /// @param maximaRanks number of ranks, if the squares have maxima; else 0.
  /// @param byNeed whether halves go by need.
  /// @throws InvalidUsage for an empty name, a bad size, a slice size below kCutAlignment, or more
  ///   than SliceKey::kMaxSlices slices.
  SliceLayout(
      std::vector<TensorSpec> tensors,
      ByteCount sliceBytes,
      bool smallFront = true,
      bool split = false,
      bool sharded = false,
      std::uint32_t maximaRanks = 0,
      bool byNeed = false);

  [[nodiscard]] const std::vector<TensorSpec>& tensors() const {
    return tensors_;
  }
  [[nodiscard]] const std::vector<Slice>& slices() const {
    return slices_;
  }
  /// Slices that carry a part of `tensor`: consecutive numbers within one buffer, for each
  /// operation.
  [[nodiscard]] std::span<const SliceIndex> slicesOf(TensorId tensor) const;
  /// Tensors that `slice` carries, wholly or in part.
  [[nodiscard]] std::span<const TensorId> tensorsOf(SliceIndex slice) const;
  [[nodiscard]] ByteCount tensorOffset(TensorId tensor) const {
    return offsets_.at(tensor);
  }
  /// Sizes of all gradient buffers, by BufferId.
  [[nodiscard]] const std::vector<ByteCount>& bufferBytes() const {
    return bufferBytes_;
  }
  /// Place of a slice among those that are ready; the lowest goes first.
  [[nodiscard]] std::uint64_t urgency(SliceIndex slice) const {
    if (!byNeed_) {
      return slice;
    }
    const bool gathers = slices_[slice].operation == Operation::kAllGather;
    return gathers ? 2 * std::uint64_t{slice - pairs()} + 1 : 2 * std::uint64_t{slice};
  }
  /// Size of the largest slice that the credit must hold.
  [[nodiscard]] ByteCount largestSliceBytes() const {
    return largestSliceBytes_;
  }
  /// "name" for a slice that is one tensor, "name[2]" for its third part, "first..last" for
  /// several; with "sum of " or "parts of " in front if split.
  [[nodiscard]] std::string sliceName(SliceIndex slice) const;

  [[nodiscard]] bool isSplit() const {
    return !slices_.empty() && slices_.back().operation == Operation::kAllGather;
  }
  /// The slice of the squares, and the tensor, in a split layout.
  static constexpr SliceIndex kSquares = 0;
  [[nodiscard]] TensorId squaresTensor() const {
    return gradients_;
  }
  [[nodiscard]] bool isSharded() const {
    return isSplit() && slices_.back().lastTensor > gradients_;
  }
  /// The parameter of a gradient in a sharded layout.
  [[nodiscard]] TensorId parameterOf(TensorId gradient) const {
    return gradients_ + 1 + gradient;
  }
  /// Number of reduce-scatters, and of all-gathers, of a split layout; else 0.
  [[nodiscard]] SliceIndex pairs() const {
    return isSplit() ? static_cast<SliceIndex>(slices_.size() / 2) : 0;
  }
  /// Bytes of the credit that a slice takes in flight. The squares take none: they are few, and all
  /// ranks wait for them.
  [[nodiscard]] ByteCount creditBytes(SliceIndex slice) const {
    return isSplit() && slice == kSquares ? 0 : slices_.at(slice).sizeBytes;
  }
  /// The all-gather of the byte range of a reduce-scatter.
  [[nodiscard]] SliceIndex gatherOf(SliceIndex reduceScatter) const {
    return reduceScatter + pairs();
  }
  /// The place in the squares of the first tensor that a reduce-scatter carries.
  [[nodiscard]] std::size_t firstSquare(SliceIndex reduceScatter) const {
    return tensorsOfSliceStart_.at(reduceScatter) - 1; // the row of slice 0 is one tensor
  }
  /// The tensors of the squares in a split layout, by place.
  [[nodiscard]] std::vector<TensorId> squaredTensors() const;
  /// Number of ranks that have maxima among the squares.
  [[nodiscard]] std::uint32_t maximaRanks() const {
    return maximaRanks_;
  }
  /// The place in the squares of a rank's maximum of gradient 0; those of the others follow it.
  [[nodiscard]] std::size_t firstMaximum(Rank rank) const {
    return firstMaximum_ + static_cast<std::size_t>(rank) * gradients_;
  }

 private:
  void place(BufferId buffer);
  void cutFromFront(BufferId buffer, ByteCount sliceBytes);
  void cutFromEnd(BufferId buffer, ByteCount sliceBytes);
  void cutTensor(TensorId id, ByteCount sliceBytes);
  void split(bool sharded, std::uint32_t maximaRanks);
  void index();

  std::vector<TensorSpec> tensors_;
  TensorId gradients_; // number of tensors without squares and parameters
  std::vector<Slice> slices_;
  std::vector<ByteCount> offsets_;
  std::vector<ByteCount> bufferBytes_;
  ByteCount largestSliceBytes_ = 0;
  std::uint32_t maximaRanks_ = 0;
  bool byNeed_ = false;
  std::size_t firstMaximum_ = 0; // of rank 0
  // Both directions of "slice carries tensor", flattened: row i is [start[i], start[i + 1]).
  std::vector<SliceIndex> slicesOfTensor_;
  std::vector<std::size_t> slicesOfTensorStart_;
  std::vector<TensorId> tensorsOfSlice_;
  std::vector<std::size_t> tensorsOfSliceStart_;
};

} // namespace hvd_order
