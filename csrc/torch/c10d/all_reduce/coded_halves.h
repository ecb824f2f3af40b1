#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "torch/c10d/all_reduce/lane.h"
#include "torch/c10d/all_reduce/slice_coding.h"
#include "torch/c10d/all_reduce/split_all_reduce.h"

namespace hvd_order {

/// One collective of a sum: the lane in which it has its turn, null for one that starts at once,
/// and what starts it.
struct Hop {
  Lane* lane;
  std::function<StartedTransfer()> start;
};

/// The halves of an encoded sum. Ranks of a host exchange values as they are, hosts exchange
/// messages. Hosts may have different numbers of ranks.
///
/// Thread safety: any thread.
class CodedHalves final {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  /// @param hosts number of each rank's host.
  /// @param between of all ranks. @param scatter, gather of the ranks of this host; null if it has
  ///   one rank. If any host has several, no group carries anything else.
  CodedHalves(std::vector<int> hosts, int rank, Group between, Group scatter, Group gather);

  /// Leaves the sum of this rank's shard of `slice` in its place, added up in float32; the rest has
  /// no defined contents. What messages lack goes into the residual.
  std::vector<Hop> reduceScatter(
      const at::Tensor& slice,
      const std::shared_ptr<const SliceCoding>& coding,
      const std::shared_ptr<PartsPool>& pool);
  /// Fills `slice` with the sums of all owners, each encoded once, also its own. What that lacks of
  /// this rank's sum goes into the residual.
  std::vector<Hop> allGather(
      const at::Tensor& slice,
      const std::shared_ptr<const SliceCoding>& coding,
      const std::shared_ptr<PartsPool>& pool);

  [[nodiscard]] std::vector<Group> groups() const;

 private:
  /// One rank of this host.
  struct Mate {
    int rank;
    /// The owners on other hosts to whom it sends the host's sum, and whose sums it hands on.
    std::vector<int> carries;

    /// Its own rank, then `carries`: the shards that this host's ranks sum there.
    [[nodiscard]] std::vector<int> owners() const;
  };

  [[nodiscard]] const Mate& self() const {
    return mates_[place_];
  }
  [[nodiscard]] int size() const {
    return static_cast<int>(hosts_.size());
  }
  /// Adds what this rank owes to elements that it does not encode.
  void addDebts(const at::Tensor& slice, const SliceCoding& coding) const;
  StartedTransfer sumInHost(const at::Tensor& slice, const SliceCoding& coding, PartsPool& pool);
  StartedTransfer sendToOwners(
      const at::Tensor& slice,
      const std::shared_ptr<const SliceCoding>& coding,
      PartsPool& pool);
  StartedTransfer sendToCarriers(
      const at::Tensor& slice,
      const std::shared_ptr<const SliceCoding>& coding,
      const at::Tensor& messages,
      PartsPool& pool);
  StartedTransfer handOn(
      const at::Tensor& slice,
      const std::shared_ptr<const SliceCoding>& coding,
      const at::Tensor& messages,
      PartsPool& pool);

  const std::vector<int> hosts_;
  std::vector<Mate> mates_;   // by place on this host
  std::size_t place_ = 0;     // this rank's
  std::vector<int> carriers_; // ranks of other hosts that carry this rank's shard, in order
  Group between_;
  Group scatter_;
  Group gather_;
  Lane betweenLane_;
  Lane scatterLane_;
  Lane gatherLane_;
};

} // namespace hvd_order
