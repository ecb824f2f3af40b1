#include "torch/c10d/all_reduce/coded_halves.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "torch/c10d/shard.h"

// Each rank's values go in codes to the owners of shards, the owners add them up, and their sums go
// back in codes. An owner's values enter the sum as they are; it takes what it sends to the others,
// so all ranks have the same bits.
//
// With several ranks on a host, that would send each host's values once for each of them. So there
// the host's ranks add up first, and a host sends the sum once:
//
//   scatter  within the host, exact: for each shard, one rank gets the values of all and adds them.
//            The shard's owner does so if it is here, otherwise the rank that carries it.
//   between  carriers send the host's sum to the owner in codes, the owner adds up the hosts' sums
//            in the order of the ranks that sent them.
//   between  the owner encodes the sum once and sends it to one carrier on each other host.
//   gather   within the host, each rank hands on the messages that it got, and its own.
//
// A rank that is alone on its host carries all shards of the others, and has only the hops between.
//
// One residual serves both halves. At each element it holds what this rank still owes to the sum:
// as a carrier, what its messages have lacked; as the owner, what the encoded sums have lacked. So
// slices may be cut anew, and shards change hands, without loss: the debt goes into the next sum
// from whoever has it. If another rank carries the element then, the debt is added to the values,
// exactly.
//
// Each level has a group of its own, and a lane: the later hops of a sum start when the earlier
// ones have ended, which each rank sees at another time. No lane waits for a later level, so none
// waits for itself.
//
// Source: the shape is that of qgZ in Wang et al., "ZeRO++", ICLR 2024, section 3.3; hosts of
// different sizes are ours. Error feedback at both ends is that of Tang et al., "DoubleSqueeze",
// ICML 2019.

namespace hvd_order {

namespace {

using Lengths = std::vector<std::int64_t>;

at::TensorOptions bytesOn(const at::Tensor& slice) {
  return at::TensorOptions().dtype(at::kByte).device(slice.device());
}

at::Tensor shardIn(const at::Tensor& slice, int owner, int size) {
  const Shard shard = shardOf(slice.numel(), owner, size);
  return slice.narrow(0, shard.begin, shard.length);
}

std::int64_t messageBytes(const SliceCoding& coding, int owner) {
  return coding.shards.at(static_cast<std::size_t>(owner)).bytes();
}

std::int64_t messageBytes(const SliceCoding& coding, const std::vector<int>& owners) {
  return std::accumulate(
      owners.begin(), owners.end(), std::int64_t{0},
      [&](std::int64_t bytes, int owner) { return bytes + messageBytes(coding, owner); });
}

/// A coder of these owners' shards, whose messages lie one behind the other.
SliceCoder coderOf(
    const at::Tensor& slice,
    const SliceCoding& coding,
    const std::vector<int>& owners,
    const at::Tensor& messages) {
  SliceCoder coder(slice, coding);
  auto* next = static_cast<std::byte*>(messages.mutable_data_ptr());
  for (const int owner : owners) {
    coder.add(static_cast<std::size_t>(owner), next);
    next += messageBytes(coding, owner);
  }
  return coder;
}

/// An all-to-all takes a message for each receiver; for one, that is the message itself.
at::Tensor copiesOf(const at::Tensor& message, std::size_t copies, PartsPool& pool) {
  if (copies == 1) {
    return message;
  }
  const std::int64_t length = message.numel();
  at::Tensor out = pool.take(static_cast<std::int64_t>(copies) * length, message.options());
  for (std::size_t copy = 0; copy < copies; ++copy) {
    copyInto(message, out.narrow(0, static_cast<std::int64_t>(copy) * length, length));
  }
  return out;
}

c10d::Backend& backendOf(const CodedHalves::Group& group, const at::Tensor& slice) {
  return *group->getBackend(slice.device().type());
}

} // namespace

std::vector<int> CodedHalves::Mate::owners() const {
  std::vector<int> owners{rank};
  owners.insert(owners.end(), carries.begin(), carries.end());
  return owners;
}

CodedHalves::CodedHalves(
    std::vector<int> hosts,
    int rank,
    Group between,
    Group scatter,
    Group gather)
    : hosts_(std::move(hosts)),
      between_(std::move(between)),
      scatter_(std::move(scatter)),
      gather_(std::move(gather)) {
  const int own = hosts_.at(static_cast<std::size_t>(rank));
  std::map<int, std::vector<int>> members;
  for (int each = 0; each < size(); ++each) {
    members[hosts_[static_cast<std::size_t>(each)]].push_back(each);
  }
  for (const int mate : members[own]) {
    place_ = mate == rank ? mates_.size() : place_;
    mates_.push_back({mate, {}});
  }
  for (const auto& [host, ranks] : members) {
    std::size_t turn = 0;
    for (int owner = 0; owner < size(); ++owner) {
      if (hosts_[static_cast<std::size_t>(owner)] == host) {
        continue;
      }
      const std::size_t carrier = turn++ % ranks.size();
      if (host == own) {
        mates_[carrier].carries.push_back(owner);
      } else if (owner == rank) {
        carriers_.push_back(ranks[carrier]);
      }
    }
  }
  std::sort(carriers_.begin(), carriers_.end());
}

std::vector<CodedHalves::Group> CodedHalves::groups() const {
  if (scatter_ == nullptr) {
    return {between_};
  }
  return {between_, scatter_, gather_};
}

void CodedHalves::addDebts(const at::Tensor& slice, const SliceCoding& coding) const {
  if (!coding.residual.defined() || !std::exchange(coding.addsDebts, false)) {
    return;
  }
  const std::vector<int> mine = self().owners();
  for (int owner = 0; owner < size(); ++owner) {
    if (std::find(mine.begin(), mine.end(), owner) == mine.end()) {
      const at::Tensor debts = shardIn(coding.residual, owner, size());
      shardIn(slice, owner, size()).add_(debts);
      debts.zero_();
    }
  }
}

StartedTransfer
CodedHalves::sumInHost(const at::Tensor& slice, const SliceCoding& coding, PartsPool& pool) {
  addDebts(slice, coding);
  Lengths theirs;
  for (const Mate& mate : mates_) {
    std::int64_t length = 0;
    for (const int owner : mate.owners()) {
      length += shardOf(slice.numel(), owner, size()).length;
    }
    theirs.push_back(length);
  }
  const std::int64_t mine = theirs[place_];
  Lengths ours(mates_.size(), mine);
  at::Tensor out = pool.take(slice.numel(), slice.options());
  std::int64_t at = 0;
  for (const Mate& mate : mates_) {
    for (const int owner : mate.owners()) {
      const at::Tensor shard = shardIn(slice, owner, size());
      copyInto(shard, out.narrow(0, at, shard.numel()));
      at += shard.numel();
    }
  }
  const auto mates = static_cast<int>(mates_.size());
  at::Tensor in = pool.take(mine * mates, slice.options());
  return {
      backendOf(scatter_, slice).alltoall_base(in, out, ours, theirs),
      [in, out, slice, mine, mates, size = size(), owners = self().owners()] {
        const at::Tensor sums = out.narrow(0, 0, mine); // what it held has been sent
        sumParts(in, mates, sums);
        std::int64_t from = 0;
        for (const int owner : owners) {
          const at::Tensor shard = shardIn(slice, owner, size);
          copyInto(sums.narrow(0, from, shard.numel()), shard);
          from += shard.numel();
        }
      }};
}

StartedTransfer CodedHalves::sendToOwners(
    const at::Tensor& slice,
    const std::shared_ptr<const SliceCoding>& coding,
    PartsPool& pool) {
  const int rank = self().rank;
  const std::int64_t mine = messageBytes(*coding, rank);
  Lengths theirs(hosts_.size(), 0);
  Lengths ours(hosts_.size(), 0);
  for (const int owner : self().carries) {
    theirs[static_cast<std::size_t>(owner)] = messageBytes(*coding, owner);
  }
  for (const int carrier : carriers_) {
    ours[static_cast<std::size_t>(carrier)] = mine;
  }
  const auto senders = static_cast<int>(carriers_.size());
  at::Tensor out = pool.take(messageBytes(*coding, self().carries), bytesOn(slice));
  at::Tensor in = pool.take(mine * senders, bytesOn(slice));
  coderOf(slice, *coding, self().carries, out).encode(/*writesBack=*/false);
  const auto before = std::lower_bound(carriers_.begin(), carriers_.end(), rank);
  const Senders of{senders + 1, static_cast<int>(before - carriers_.begin()), mine};
  return {
      backendOf(between_, slice).alltoall_base(in, out, ours, theirs),
      [in, out, slice, coding, rank, of] { coderOf(slice, *coding, {rank}, in).decode(of); }};
}

StartedTransfer CodedHalves::sendToCarriers(
    const at::Tensor& slice,
    const std::shared_ptr<const SliceCoding>& coding,
    const at::Tensor& messages,
    PartsPool& pool) {
  const std::int64_t mine = messageBytes(*coding, self().rank);
  Lengths theirs(hosts_.size(), 0);
  Lengths ours(hosts_.size(), 0);
  for (const int carrier : carriers_) {
    theirs[static_cast<std::size_t>(carrier)] = mine;
  }
  for (const int owner : self().carries) {
    ours[static_cast<std::size_t>(owner)] = messageBytes(*coding, owner);
  }
  const at::Tensor own = messages.narrow(0, 0, mine);
  coderOf(slice, *coding, {self().rank}, own).encode(/*writesBack=*/true);
  at::Tensor out = copiesOf(own, carriers_.size(), pool);
  at::Tensor in = messages.narrow(0, mine, messages.numel() - mine);
  return {
      backendOf(between_, slice).alltoall_base(in, out, ours, theirs),
      [in, out, slice, coding, carries = self().carries] {
        coderOf(slice, *coding, carries, in).decode({1, -1, 0});
      }};
}

StartedTransfer CodedHalves::handOn(
    const at::Tensor& slice,
    const std::shared_ptr<const SliceCoding>& coding,
    const at::Tensor& messages,
    PartsPool& pool) {
  Lengths theirs(mates_.size(), messages.numel());
  Lengths ours;
  std::vector<int> owners;
  theirs[place_] = 0;
  for (const Mate& mate : mates_) {
    const std::vector<int> of = mate.rank == self().rank ? std::vector<int>{} : mate.owners();
    ours.push_back(messageBytes(*coding, of));
    owners.insert(owners.end(), of.begin(), of.end());
  }
  at::Tensor out = copiesOf(messages, mates_.size() - 1, pool);
  at::Tensor in = pool.take(messageBytes(*coding, owners), bytesOn(slice));
  return {
      backendOf(gather_, slice).alltoall_base(in, out, ours, theirs),
      [in, out, slice, coding, owners] { coderOf(slice, *coding, owners, in).decode({1, -1, 0}); }};
}

std::vector<Hop> CodedHalves::reduceScatter(
    const at::Tensor& slice,
    const std::shared_ptr<const SliceCoding>& coding,
    const std::shared_ptr<PartsPool>& pool) {
  std::vector<Hop> hops;
  if (scatter_ != nullptr) {
    hops.push_back({&scatterLane_, [=, this] { return sumInHost(slice, *coding, *pool); }});
  }
  hops.push_back({&betweenLane_, [=, this] { return sendToOwners(slice, coding, *pool); }});
  return hops;
}

std::vector<Hop> CodedHalves::allGather(
    const at::Tensor& slice,
    const std::shared_ptr<const SliceCoding>& coding,
    const std::shared_ptr<PartsPool>& pool) {
  // This rank's message, then those that it carries.
  const at::Tensor messages = pool->take(messageBytes(*coding, self().owners()), bytesOn(slice));
  std::vector<Hop> hops;
  hops.push_back(
      {&betweenLane_, [=, this] { return sendToCarriers(slice, coding, messages, *pool); }});
  if (gather_ != nullptr) {
    hops.push_back({&gatherLane_, [=, this] { return handOn(slice, coding, messages, *pool); }});
  }
  return hops;
}

} // namespace hvd_order
