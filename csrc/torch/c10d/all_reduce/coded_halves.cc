#include "torch/c10d/all_reduce/coded_halves.h"

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

/// What one half of a slice sends and receives: a message for, or from, each other rank.
struct Exchange {
  Exchange(c10d::Backend& backend, const SliceCoding& coding)
      : size(backend.getSize()),
        rank(backend.getRank()),
        own(static_cast<std::size_t>(rank)),
        mine(coding.shards.at(own).bytes()),
        ofOwn(coding.shards.size(), mine) {
    for (const MessageLayout& shard : coding.shards) {
      ofOthers.push_back(shard.bytes());
      all += shard.bytes();
    }
    ofOthers[own] = 0;
    ofOwn[own] = 0;
  }
  /// Bytes of messages that carry the other ranks' shards, and of those that carry this rank's.
  [[nodiscard]] std::int64_t othersBytes() const {
    return all - mine;
  }
  [[nodiscard]] std::int64_t ownBytes() const {
    return mine * (size - 1);
  }

  int size;
  int rank;
  std::size_t own;
  std::int64_t mine; ///< length of a message that carries this rank's shard
  std::int64_t all = 0;
  std::vector<std::int64_t> ofOthers; ///< by rank; back ends may take the lengths away
  std::vector<std::int64_t> ofOwn;
};

at::TensorOptions bytesOn(const at::Tensor& slice) {
  return at::TensorOptions().dtype(at::kByte).device(slice.device());
}

std::byte* startOf(const at::Tensor& messages) {
  return static_cast<std::byte*>(messages.mutable_data_ptr());
}

/// A coder of the shards of all other ranks, whose messages lie one behind the other.
SliceCoder othersIn(
    const at::Tensor& messages,
    const at::Tensor& slice,
    const SliceCoding& coding,
    std::size_t own) {
  SliceCoder coder(slice, coding);
  std::byte* next = startOf(messages);
  for (std::size_t shard = 0; shard < coding.shards.size(); ++shard) {
    if (shard != own) {
      coder.add(shard, next);
      next += coding.shards[shard].bytes();
    }
  }
  return coder;
}

SliceCoder ownIn(
    const at::Tensor& messages,
    const at::Tensor& slice,
    const SliceCoding& coding,
    std::size_t own) {
  SliceCoder coder(slice, coding);
  coder.add(own, startOf(messages));
  return coder;
}

} // namespace

StartedTransfer reduceScatterCoded(
    c10d::Backend& backend,
    const at::Tensor& slice,
    std::shared_ptr<const SliceCoding> coding,
    PartsPool& pool) {
  Exchange to(backend, *coding);
  at::Tensor out = pool.take(to.othersBytes(), bytesOn(slice));
  at::Tensor in = pool.take(to.ownBytes(), bytesOn(slice));
  othersIn(out, slice, *coding, to.own).encode(/*writesBack=*/false);
  const Senders senders{to.size, to.rank, to.mine};
  return {
      backend.alltoall_base(in, out, to.ofOwn, to.ofOthers),
      [in, out, slice, coding, senders] { // `out`: until the transfer has ended
        ownIn(in, slice, *coding, static_cast<std::size_t>(senders.own)).decode(senders);
      }};
}

StartedTransfer allGatherCoded(
    c10d::Backend& backend,
    const at::Tensor& slice,
    std::shared_ptr<const SliceCoding> coding,
    PartsPool& pool) {
  Exchange to(backend, *coding);
  at::Tensor out = pool.take(to.ownBytes(), bytesOn(slice));
  at::Tensor in = pool.take(to.othersBytes(), bytesOn(slice));
  if (to.size > 1) {
    ownIn(out, slice, *coding, to.own).encode(/*writesBack=*/true);
  }
  for (int copy = 1; copy < to.size - 1; ++copy) {
    copyInto(out.narrow(0, 0, to.mine), out.narrow(0, copy * to.mine, to.mine));
  }
  return {
      backend.alltoall_base(in, out, to.ofOthers, to.ofOwn),
      [in, out, slice, coding, own = to.own] {
        othersIn(in, slice, *coding, own).decode({1, -1, 0});
      }};
}

} // namespace hvd_order
