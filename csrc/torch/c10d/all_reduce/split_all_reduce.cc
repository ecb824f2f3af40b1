#include "torch/c10d/all_reduce/split_all_reduce.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "torch/c10d/shard.h"
#include "torch/packing/element_type.h"

// A rank's shard is the same range of the slice in both halves: in place, without copies, where
// the slice divides evenly.
//
// Back ends differ in what they make of a reduce-scatter. Gloo's moves as much as an all-reduce, so
// the parts are exchanged with an all-to-all there, and each rank adds up its own. The caller
// measures which form is faster (half_forms.py).
//
// Collectives want equal parts: a slice that does not divide evenly goes through padded memory. An
// all-to-all takes parts of any length.

namespace hvd_order {

namespace {

std::int64_t partOf(std::int64_t elements, int size) {
  return (elements + size - 1) / size;
}

at::Tensor rangeOf(const at::Tensor& slice, Shard shard) {
  return slice.narrow(0, shard.begin, shard.length);
}

std::vector<std::int64_t> lengthsOf(std::int64_t elements, int size) {
  std::vector<std::int64_t> lengths;
  lengths.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    lengths.push_back(shardOf(elements, rank, size).length);
  }
  return lengths;
}

} // namespace

void sumParts(const at::Tensor& parts, int count, const at::Tensor& out) {
  if (out.numel() == 0) { // more ranks than elements
    return;
  }
  if (!parts.is_cpu()) {
    const bool narrow = c10::isReducedFloatingType(parts.scalar_type());
    out.copy_(parts.view({count, -1})
                  .sum(0, /*keepdim=*/false, narrow ? at::kFloat : parts.scalar_type()));
    return;
  }
  const auto bytes = static_cast<std::size_t>(out.nbytes());
  const auto* first = static_cast<const std::byte*>(parts.const_data_ptr());
  std::vector<const std::byte*> inputs;
  inputs.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    inputs.push_back(first + static_cast<std::size_t>(i) * bytes);
  }
  sum(elementTypeOf(parts), inputs, static_cast<std::byte*>(out.mutable_data_ptr()), bytes);
}

void copyInto(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_cpu()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    to.copy_(from);
  }
}

at::Tensor PartsPool::take(std::int64_t elements, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) { // devices have an allocator of their own
    return at::empty({elements}, options);
  }
  const auto bytes = elements * static_cast<std::int64_t>(options.dtype().itemsize());
  at::Tensor memory;
  {
    const std::scoped_lock lock(mutex_);
    const auto fits = std::find_if(
        free_.begin(), free_.end(), [&](const at::Tensor& each) { return each.numel() >= bytes; });
    if (fits != free_.end()) {
      memory = std::move(*fits);
      free_.erase(fits);
    } else if (!free_.empty()) {
      free_.pop_back(); // too small: a larger one takes its place
    }
  }
  if (!memory.defined()) {
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  }
  void* const data = memory.mutable_data_ptr();
  return at::for_blob(data, {elements})
      .options(options)
      .deleter([pool = weak_from_this(), memory](void*) {
        if (const auto self = pool.lock()) {
          const std::scoped_lock lock(self->mutex_);
          self->free_.push_back(memory);
        }
      })
      .make_tensor();
}

StartedTransfer
reduceScatter(c10d::Backend& backend, const at::Tensor& slice, HalfForm form, PartsPool& pool) {
  const int size = backend.getSize();
  const std::int64_t elements = slice.numel();
  const std::int64_t part = partOf(elements, size);
  const at::Tensor mine = rangeOf(slice, shardOf(elements, backend.getRank(), size));
  at::Tensor from = slice;
  if (form == HalfForm::kExchange) {
    at::Tensor parts = pool.take(mine.numel() * size, slice.options());
    std::vector<std::int64_t> theirs = lengthsOf(elements, size);
    std::vector<std::int64_t> ours(static_cast<std::size_t>(size), mine.numel());
    return {backend.alltoall_base(parts, from, ours, theirs), [parts, size, mine] {
              sumParts(parts, size, mine);
            }};
  }
  if (elements == part * size) {
    at::Tensor out = mine;
    return {backend._reduce_scatter_base(out, from), [] {}};
  }
  at::Tensor padded = pool.take(part * size, slice.options());
  copyInto(slice, padded.narrow(0, 0, elements));
  padded.narrow(0, elements, part * size - elements).zero_();
  at::Tensor out = padded.narrow(0, backend.getRank() * part, part);
  return {backend._reduce_scatter_base(out, padded), [out, mine] {
            copyInto(out.narrow(0, 0, mine.numel()), mine);
          }};
}

StartedTransfer
allGather(c10d::Backend& backend, const at::Tensor& slice, HalfForm form, PartsPool& pool) {
  const int size = backend.getSize();
  const std::int64_t elements = slice.numel();
  const std::int64_t part = partOf(elements, size);
  at::Tensor mine = rangeOf(slice, shardOf(elements, backend.getRank(), size));
  at::Tensor to = slice;
  if (form == HalfForm::kExchange) {
    at::Tensor copies = pool.take(mine.numel() * size, slice.options());
    for (int rank = 0; rank < size; ++rank) {
      copyInto(mine, copies.narrow(0, rank * mine.numel(), mine.numel()));
    }
    std::vector<std::int64_t> theirs = lengthsOf(elements, size);
    std::vector<std::int64_t> ours(static_cast<std::size_t>(size), mine.numel());
    return {backend.alltoall_base(to, copies, theirs, ours), [copies] {}};
  }
  if (elements == part * size) {
    return {backend._allgather_base(to, mine), [] {}};
  }
  at::Tensor padded = pool.take(part * size, slice.options());
  at::Tensor in = padded.narrow(0, backend.getRank() * part, part);
  copyInto(mine, in.narrow(0, 0, mine.numel()));
  in.narrow(0, mine.numel(), part - mine.numel()).zero_();
  return {backend._allgather_base(padded, in), [padded, slice, elements] {
            copyInto(padded.narrow(0, 0, elements), slice);
          }};
}

} // namespace hvd_order
