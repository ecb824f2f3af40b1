#include "scheduler/slice_layout.h"

#include <algorithm>

#include "base/error.h"

// Cuts each gradient buffer into slices in one pass over its tensors.
//
// The newest slice stays open while it holds only whole tensors. The next tensor joins it if the
// sum fits the fused size; otherwise the tensor starts a slice, or several equal ones if it is
// larger than the slice size. With a small front, the pass begins at the front, and the fused size
// grows with the offset in the buffer, from an eighth of the slice size to the whole: the front of
// a buffer is produced last and needed first, so its slices should be short. Otherwise the fused
// size is the slice size, and the pass begins at the end, as DistributedDataParallel fills its
// buckets: the rest, which may be small, is then produced last.
//
// Buffers are cut one after the other and then merged by a stable sort on the first tensor. So
// slice numbers follow consumption order across buffers, and the parts of a tensor keep their
// order and get consecutive numbers. A split happens last: it repeats all slices. In a sharded
// layout the repeated ones carry other tensors in the same places.
//
// Invariants: for each operation, the slices of a buffer cover it without gaps or overlaps; a slice
// holds either whole tensors or a part of one; no slice is larger than the slice size, apart from
// that of the squares, which is one slice whatever its size. The relation "slice carries tensor" is
// stored in both directions as flat rows, so that events cost no search.
//
// Source: P3 (Jayarajan et al., MLSys 2019) for slices of large tensors in consumption order.

namespace hvd_order {

namespace {

constexpr ByteCount kTensorAlignment = 16;
constexpr ByteCount kFirstFraction = 8;

ByteCount roundUp(ByteCount value, ByteCount multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

} // namespace

SliceLayout::SliceLayout(
    std::vector<TensorSpec> tensors,
    ByteCount sliceBytes,
    bool smallFront,
    bool split,
    bool sharded,
    std::uint32_t maximaRanks,
    bool byNeed)
    : tensors_(std::move(tensors)),
      gradients_(static_cast<TensorId>(tensors_.size())),
      byNeed_(byNeed && split && !sharded) {
  if (sliceBytes < kCutAlignment) {
    throw InvalidUsage(
        concat("slice size is ", sliceBytes, " bytes; the least is ", kCutAlignment, " bytes"));
  }
  BufferId buffers = 0;
  for (const TensorSpec& tensor : tensors_) {
    if (tensor.name.empty()) {
      throw InvalidUsage("every tensor needs a name");
    }
    if (tensor.sizeBytes <= 0 || tensor.sizeBytes % kTensorAlignment != 0) {
      throw InvalidUsage(concat(
          "tensor '", tensor.name, "' takes ", tensor.sizeBytes,
          " bytes of its gradient buffer; a positive multiple of ", kTensorAlignment,
          " is needed"));
    }
    buffers = std::max(buffers, tensor.buffer + 1);
  }
  offsets_.resize(tensors_.size());
  bufferBytes_.resize(buffers, 0);
  for (BufferId buffer = 0; buffer < buffers; ++buffer) {
    place(buffer);
    if (smallFront) {
      cutFromFront(buffer, sliceBytes);
    } else {
      cutFromEnd(buffer, sliceBytes);
    }
  }
  // Buffers were cut one after the other; consumption order spans all of them. The parts of a
  // tensor are in order.
  std::stable_sort(slices_.begin(), slices_.end(), [](const Slice& a, const Slice& b) {
    return a.firstTensor < b.firstTensor;
  });
  if (split && !slices_.empty()) {
    this->split(sharded, maximaRanks);
  }
  if (slices_.size() > SliceKey::kMaxSlices) {
    throw InvalidUsage(concat(
        "slices of ", sliceBytes, " bytes cut the model into ", slices_.size(), " slices; at most ",
        SliceKey::kMaxSlices, " can be numbered, so take larger slices"));
  }
  index();
}

void SliceLayout::place(BufferId buffer) {
  ByteCount end = 0;
  for (TensorId id = 0; id < tensors_.size(); ++id) {
    if (tensors_[id].buffer == buffer) {
      offsets_[id] = end;
      end += tensors_[id].sizeBytes;
    }
  }
  bufferBytes_[buffer] = end;
}

void SliceLayout::cutFromFront(BufferId buffer, ByteCount sliceBytes) {
  const auto fusedBytes = [&](const Slice& slice) {
    const ByteCount least = std::max(sliceBytes / kFirstFraction, kCutAlignment);
    return std::clamp(slice.offsetBytes, least, sliceBytes);
  };
  bool open = false; // whether the newest slice may take further whole tensors
  for (TensorId id = 0; id < tensors_.size(); ++id) {
    const TensorSpec& tensor = tensors_[id];
    if (tensor.buffer != buffer) {
      continue;
    }
    if (open && slices_.back().sizeBytes + tensor.sizeBytes <= fusedBytes(slices_.back())) {
      slices_.back().sizeBytes += tensor.sizeBytes;
      slices_.back().lastTensor = id;
    } else {
      cutTensor(id, sliceBytes);
      open = tensor.sizeBytes <= sliceBytes;
    }
  }
}

void SliceLayout::cutFromEnd(BufferId buffer, ByteCount sliceBytes) {
  bool open = false;
  for (auto id = static_cast<TensorId>(tensors_.size()); id-- > 0;) {
    const TensorSpec& tensor = tensors_[id];
    if (tensor.buffer != buffer) {
      continue;
    }
    if (open && slices_.back().sizeBytes + tensor.sizeBytes <= sliceBytes) {
      slices_.back().sizeBytes += tensor.sizeBytes;
      slices_.back().offsetBytes = offsets_[id];
      slices_.back().firstTensor = id;
    } else {
      cutTensor(id, sliceBytes);
      open = tensor.sizeBytes <= sliceBytes;
    }
  }
}

// Slices of one tensor only; whole if it fits.
void SliceLayout::cutTensor(TensorId id, ByteCount sliceBytes) {
  const auto& [name, sizeBytes, buffer] = tensors_[id];
  const ByteCount parts = (sizeBytes + sliceBytes - 1) / sliceBytes;
  const ByteCount part = parts == 1 ? sizeBytes
                                    : std::min(
                                          roundUp((sizeBytes + parts - 1) / parts, kCutAlignment),
                                          sliceBytes / kCutAlignment * kCutAlignment);
  for (ByteCount at = 0; at < sizeBytes; at += part) {
    slices_.push_back({buffer, offsets_[id] + at, std::min(part, sizeBytes - at), id, id});
  }
}

void SliceLayout::split(bool sharded, std::uint32_t maximaRanks) {
  const std::size_t count = slices_.size();
  std::size_t squares = 0;
  for (const Slice& slice : slices_) {
    for (TensorId id = slice.firstTensor; id <= slice.lastTensor; ++id) {
      squares += tensors_[id].buffer == slice.buffer ? 1U : 0U;
    }
  }
  squares *= sharded ? 2U : 1U;
  maximaRanks_ = maximaRanks;
  firstMaximum_ = squares;
  squares += std::size_t{maximaRanks} * gradients_;
  const auto buffer = static_cast<BufferId>(bufferBytes_.size());
  const auto tensor = static_cast<TensorId>(tensors_.size());
  const ByteCount size =
      roundUp(static_cast<ByteCount>(squares * sizeof(double)), kTensorAlignment);
  tensors_.push_back({"squares", size, buffer});
  offsets_.push_back(0);
  bufferBytes_.push_back(size);
  std::vector<Slice> halves{{buffer, 0, size, tensor, tensor}};
  for (const Operation operation : {Operation::kReduceScatter, Operation::kAllGather}) {
    halves.insert(halves.end(), slices_.begin(), slices_.end());
    std::for_each(
        halves.end() - static_cast<std::ptrdiff_t>(count), halves.end(),
        [&](Slice& half) { half.operation = operation; });
  }
  slices_ = std::move(halves);
  if (!sharded) {
    return;
  }
  for (TensorId gradient = 0; gradient < gradients_; ++gradient) {
    const TensorSpec spec = tensors_[gradient]; // a copy: the vector grows
    tensors_.push_back({"parameter " + spec.name, spec.sizeBytes, spec.buffer});
    offsets_.push_back(offsets_[gradient]);
  }
  for (Slice& slice : slices_) {
    if (slice.operation == Operation::kAllGather) {
      slice.firstTensor = parameterOf(slice.firstTensor);
      slice.lastTensor = parameterOf(slice.lastTensor);
    }
  }
}

void SliceLayout::index() {
  std::vector<std::vector<SliceIndex>> slicesOf(tensors_.size());
  tensorsOfSliceStart_.push_back(0);
  for (SliceIndex slice = 0; slice < slices_.size(); ++slice) {
    const Slice& s = slices_[slice];
    largestSliceBytes_ = std::max(largestSliceBytes_, creditBytes(slice));
    for (TensorId id = s.firstTensor; id <= s.lastTensor; ++id) {
      if (tensors_[id].buffer == s.buffer) {
        slicesOf[id].push_back(slice);
        tensorsOfSlice_.push_back(id);
      }
    }
    tensorsOfSliceStart_.push_back(tensorsOfSlice_.size());
  }
  slicesOfTensorStart_.push_back(0);
  for (const auto& row : slicesOf) {
    slicesOfTensor_.insert(slicesOfTensor_.end(), row.begin(), row.end());
    slicesOfTensorStart_.push_back(slicesOfTensor_.size());
  }
}

std::span<const SliceIndex> SliceLayout::slicesOf(TensorId tensor) const {
  HVDO_CHECK(tensor < tensors_.size(), "tensor ", tensor, " of ", tensors_.size());
  return std::span(slicesOfTensor_)
      .subspan(
          slicesOfTensorStart_[tensor],
          slicesOfTensorStart_[tensor + 1] - slicesOfTensorStart_[tensor]);
}

std::span<const TensorId> SliceLayout::tensorsOf(SliceIndex slice) const {
  HVDO_CHECK(slice < slices_.size(), "slice ", slice, " of ", slices_.size());
  return std::span(tensorsOfSlice_)
      .subspan(
          tensorsOfSliceStart_[slice],
          tensorsOfSliceStart_[slice + 1] - tensorsOfSliceStart_[slice]);
}

std::vector<TensorId> SliceLayout::squaredTensors() const {
  if (!isSplit()) {
    return {};
  }
  const auto begin = tensorsOfSlice_.begin();
  return {
      begin + static_cast<std::ptrdiff_t>(tensorsOfSliceStart_[1]),
      begin + static_cast<std::ptrdiff_t>(tensorsOfSliceStart_[1 + pairs()])};
}

std::string SliceLayout::sliceName(SliceIndex slice) const {
  const Slice& s = slices_.at(slice);
  const std::string& first = tensors_[s.firstTensor].name;
  const std::string prefix = s.operation == Operation::kReduceScatter ? "sum of "
      : s.operation == Operation::kAllGather                          ? "parts of "
                                                                      : "";
  if (s.firstTensor != s.lastTensor) {
    return prefix + first + ".." + tensors_[s.lastTensor].name;
  }
  const std::span<const SliceIndex> all = slicesOf(s.firstTensor);
  const bool bothHalves = isSplit() && !isSharded() && slice != kSquares;
  const std::size_t parts = bothHalves ? all.size() / 2 : all.size();
  const std::size_t part = (slice - all.front()) % std::max<std::size_t>(pairs(), parts);
  return prefix + (parts == 1 ? first : concat(first, "[", part, "]"));
}

} // namespace hvd_order
