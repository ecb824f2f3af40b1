#pragma once

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
/// Immutable, hence safe to share between threads.
class SliceLayout final {
 public:
  /// Slices of one tensor are cut at multiples of this size, so that no element is split.
  static constexpr ByteCount kCutAlignment = 64;

  /// @param tensors in consumption order; every size must be a positive multiple of 16 bytes, so
  ///   that each tensor starts aligned for every dtype (complex128 is the widest).
  /// @param smallFront whether slices at the front of a buffer are shorter.
  /// @throws InvalidUsage for an empty name, a bad size, a slice size below kCutAlignment, or more
  ///   than SliceKey::kMaxSlices slices.
  SliceLayout(std::vector<TensorSpec> tensors, ByteCount sliceBytes, bool smallFront = true);

  [[nodiscard]] const std::vector<TensorSpec>& tensors() const {
    return tensors_;
  }
  [[nodiscard]] const std::vector<Slice>& slices() const {
    return slices_;
  }
  /// Slices that carry a part of `tensor`; always consecutive numbers within one buffer.
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
  [[nodiscard]] ByteCount largestSliceBytes() const {
    return largestSliceBytes_;
  }
  /// "name" for a slice that is one tensor, "name[2]" for its third part, "first..last" for
  /// several.
  [[nodiscard]] std::string sliceName(SliceIndex slice) const;

 private:
  void place(BufferId buffer);
  void cutFromFront(BufferId buffer, ByteCount sliceBytes);
  void cutFromEnd(BufferId buffer, ByteCount sliceBytes);
  void cutTensor(TensorId id, ByteCount sliceBytes);
  void index();

  std::vector<TensorSpec> tensors_;
  std::vector<Slice> slices_;
  std::vector<ByteCount> offsets_;
  std::vector<ByteCount> bufferBytes_;
  ByteCount largestSliceBytes_ = 0;
  // Both directions of "slice carries tensor", flattened: row i is [start[i], start[i + 1]).
  std::vector<SliceIndex> slicesOfTensor_;
  std::vector<std::size_t> slicesOfTensorStart_;
  std::vector<TensorId> tensorsOfSlice_;
  std::vector<std::size_t> tensorsOfSliceStart_;
};

} // namespace hvd_order
