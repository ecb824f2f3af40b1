#include "torch/c10d/all_reduce/coded_halves.h"

#include <cstring>

// A split all-reduce whose parts are encoded (cuda/codes.h): all-to-all of messages, a sum on each
// shard's owner, and an all-to-all of one message each.
//
// A rank's own shard has no message in the first half: its values enter the sum as they are. In the
// second half its owner takes what it has sent, so all ranks have the same bits.
//
// One residual serves both halves. At each element it holds what this rank still owes to the sum:
// where another rank owns the shard, what its messages have lacked; where this rank does, what the
// encoded sums have lacked. So slices may be cut anew, and shards change hands, without loss: the
// debt goes into the next sum from whoever has it.
//
// Source: the shape is that of qgZ in Wang et al., "ZeRO++", ICLR 2024, section 3.3, without its
// second level; error feedback at both ends is that of Tang et al., "DoubleSqueeze", ICML 2019.

namespace hvd_order {

namespace {

using Lengths = std::vector<std::int64_t>;

/// Lengths of the messages to, or from, the other ranks; none for `own`.
Lengths lengthsOf(const SliceCoding& coding, int own) {
  Lengths lengths;
  for (const MessageLayout& shard : coding.shards) {
    lengths.push_back(shard.bytes());
  }
  lengths.at(static_cast<std::size_t>(own)) = 0;
  return lengths;
}

std::int64_t total(const Lengths& lengths) {
  std::int64_t sum = 0;
  for (const std::int64_t length : lengths) {
    sum += length;
  }
  return sum;
}

at::TensorOptions bytesOn(const at::Tensor& slice) {
  return at::TensorOptions().dtype(at::kByte).device(slice.device());
}

std::byte* startOf(const at::Tensor& messages) {
  return static_cast<std::byte*>(messages.mutable_data_ptr());
}

} // namespace

StartedTransfer reduceScatterCoded(
    c10d::Backend& backend,
    const at::Tensor& slice,
    std::shared_ptr<const SliceCoding> coding,
    PartsPool& pool) {
  const int size = backend.getSize();
  const int rank = backend.getRank();
  const auto own = static_cast<std::size_t>(rank);
  Lengths theirs = lengthsOf(*coding, rank); // back ends may take the lengths away
  at::Tensor out = pool.take(total(theirs), bytesOn(slice));
  MessageEncoder encoder(slice, *coding);
  std::byte* next = startOf(out);
  for (std::size_t shard = 0; shard < theirs.size(); ++shard) {
    if (shard != own) {
      encoder.add(shard, next);
      next += theirs[shard];
    }
  }
  encoder.encode(/*writesBack=*/false);
  const std::int64_t mine = coding->shards[own].bytes();
  Lengths ours(theirs.size(), mine);
  ours[own] = 0;
  at::Tensor in = pool.take(mine * (size - 1), bytesOn(slice));
  return {backend.alltoall_base(in, out, ours, theirs), [=] {
            MessageEncoder sums(slice, *coding);
            sums.add(own, startOf(in));
            sums.decode({size, rank, mine});
            static_cast<void>(out); // until the transfer has ended
          }};
}

StartedTransfer allGatherCoded(
    c10d::Backend& backend,
    const at::Tensor& slice,
    std::shared_ptr<const SliceCoding> coding,
    PartsPool& pool) {
  const int size = backend.getSize();
  const int rank = backend.getRank();
  const auto own = static_cast<std::size_t>(rank);
  const std::int64_t mine = coding->shards[own].bytes();
  at::Tensor out = pool.take(mine * (size - 1), bytesOn(slice));
  if (size > 1) {
    MessageEncoder encoder(slice, *coding);
    encoder.add(own, startOf(out));
    encoder.encode(/*writesBack=*/true);
  }
  for (int copy = 1; copy < size - 1; ++copy) {
    at::Tensor to = out.narrow(0, copy * mine, mine);
    if (out.is_cpu()) {
      std::memcpy(startOf(to), startOf(out), static_cast<std::size_t>(mine));
    } else {
      to.copy_(out.narrow(0, 0, mine));
    }
  }
  Lengths theirs = lengthsOf(*coding, rank);
  Lengths ours(theirs.size(), mine);
  ours[own] = 0;
  at::Tensor in = pool.take(total(theirs), bytesOn(slice));
  return {backend.alltoall_base(in, out, theirs, ours), [=] {
            MessageEncoder sums(slice, *coding);
            std::byte* next = startOf(in);
            for (std::size_t shard = 0; shard < coding->shards.size(); ++shard) {
              if (shard != own) {
                sums.add(shard, next);
                next += coding->shards[shard].bytes();
              }
            }
            sums.decode({1, -1, 0});
            static_cast<void>(out);
          }};
}

} // namespace hvd_order
