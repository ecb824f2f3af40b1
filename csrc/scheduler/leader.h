#pragma once

#include "scheduler/agreement.h"

namespace hvd_order {

/// Rank 0 of AgreementKind::kLeader and kNegotiated: issues what is most urgent among the slices
/// that are ready here and on every rank it *hears*, and tells everybody. Of the other ranks it
/// takes it for granted.
///
/// It hears a rank when that rank asks for it, by an empty message, and until it asks again. Rank 0
/// answers with an empty message among its decisions. What it decides after the answer, it decides
/// by what the rank reports: each slice once for each time it is ready, except slices decided
/// before the answer.
class Leader final : public Agreement {
 public:
  /// @param hearsAll all ranks from the start, without being asked: kNegotiated.
  Leader(int size, Policy policy, ByteCount creditBytes, bool hearsAll);

  void addModel(
      ModelId model,
      std::shared_ptr<const SliceLayout> layout,
      std::vector<SliceIndex> plan) override;
  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;

 private:
  struct Model {
    /// By slice: how many ranks, of this one and those heard, lack it for the next time it goes.
    std::vector<int> lacking;
    std::vector<std::uint8_t> offered; // by slice: a candidate of the scheduler
  };
  struct Peer {
    bool heard = false;
    /// By model and slice: reports less the times the slice was offered by them. Below zero, it was
    /// offered before the rank was heard, and its report is still to come.
    std::vector<std::vector<int>> ahead;
  };
  struct EarlyReport {
    Rank from;
    SliceKey slice;
  };

  void reported(Rank from, SliceKey slice);
  void lacksOneLess(SliceKey slice);
  void offer(SliceKey slice);
  void hear(Rank rank);
  void hearNoMore(Rank rank);

  int heardPeers_ = 0;
  std::vector<Peer> peers_;        // by rank; the first is this rank, and unused
  std::vector<Model> models_;      // by id
  std::vector<EarlyReport> early_; // for models not registered here yet
  std::vector<Rank> answers_;      // to ranks that asked, not sent yet
};

} // namespace hvd_order
