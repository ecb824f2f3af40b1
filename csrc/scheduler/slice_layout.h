#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// A tensor as the layout sees it: `sizeBytes` of gradient buffer number `buffer`.
struct TensorSpec {
  std::string name;
  ByteCount sizeBytes;
  BufferId buffer;
};

/// Contiguous byte range of a gradient buffer: the unit of transfer.
///
/// It covers the tensors `firstTensor..lastTensor` of its buffer (ids in consumption order; tensors
/// of other buffers may lie between them), or a part of one tensor.
struct Slice {
  BufferId buffer;
  ByteCount offsetBytes;
  ByteCount sizeBytes;
  TensorId firstTensor;
  TensorId lastTensor;
};

/// Where every tensor lies in its gradient buffer, and how the buffers are cut into slices.
///
/// Tensors come in consumption order and lie in their buffer in that order. Whole neighbours share
/// a slice while they fit `sliceBytes` (fusion); a tensor that is larger has slices of its own, as
/// equal as alignment allows (partitioning). So no slice waits for the tail of a large tensor
/// and the whole of a small one. Slices are numbered by the first tensor they carry.
///
/// What is consumed first is produced last and waited for at once: it must not wait for neighbours
/// that have time. A fused slice is therefore no longer than what lies before it in the buffer,
/// from an eighth of `sliceBytes` on.
///
/// Immutable, hence safe to share between threads.
class SliceLayout final {
 public:
  /// Slices of one tensor are cut at multiples of this, so that no element is ever split.
  static constexpr ByteCount kCutAlignment = 64;

  /// @param tensors in consumption order; every size must be a positive multiple of 16 bytes, so
  ///   that each tensor starts aligned for every dtype (complex128 is the widest).
  /// @throws InvalidUsage on an empty name, a bad size or a slice size below kCutAlignment.
  SliceLayout(std::vector<TensorSpec> tensors, ByteCount sliceBytes);

  [[nodiscard]] const std::vector<TensorSpec>& tensors() const {
    return tensors_;
  }
  [[nodiscard]] const std::vector<Slice>& slices() const {
    return slices_;
  }
  /// Slices that carry a part of `tensor`; always consecutive numbers within one buffer.
  [[nodiscard]] std::span<const SliceIndex> slicesOf(TensorId tensor) const;
  /// Tensors of which `slice` carries a part.
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
  void cutBuffer(BufferId buffer, ByteCount sliceBytes);
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
