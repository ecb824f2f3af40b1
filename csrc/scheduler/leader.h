#pragma once

#include "scheduler/agreement.h"

namespace hvd_order {

/// Rank 0 under AgreementKind::kLeader and kNegotiated. Issues the most urgent of the slices that
/// are ready on rank 0 and on every rank it *hears*, and sends its decisions to all ranks. It
/// assumes that a slice is ready, or soon will be, on ranks that it does not hear.
///
/// An empty message from a rank asks rank 0 to hear it; a second one asks rank 0 to stop. Rank 0
/// answers with an empty message in the stream of its decisions. Decisions after the answer use
/// the rank's reports. The rank reports each slice once for each time it is ready, except slices
/// that rank 0 decided before the answer.
class Leader final : public Agreement {
 public:
  /// @param hearsAll hear all ranks from the start, without a request, as kNegotiated requires.
  Leader(int size, Policy policy, ByteCount creditBytes, bool hearsAll);

  void addModel(
      ModelId model,
      std::shared_ptr<const SliceLayout> layout,
      std::vector<SliceIndex> plan) override;
  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;
  [[nodiscard]] std::unique_ptr<Agreement> clone() const override {
    return std::make_unique<Leader>(*this);
  }
  void appendState(StateWords& words) const override;

 private:
  struct Model {
    /// By slice: number of ranks, among rank 0 and those heard, on which its next round is not
    /// ready.
    std::vector<int> lacking;
    std::vector<std::uint8_t> offered; // by slice: a candidate of the scheduler
  };
  struct Peer {
    bool heard = false;
    /// By model and slice: number of reports minus number of offers. Below zero, the slice was
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
  std::vector<Peer> peers_;        // by rank; the first, rank 0 itself, is unused
  std::vector<Model> models_;      // by id
  std::vector<EarlyReport> early_; // for models not registered here yet
  std::vector<Rank> answers_;      // to ranks that asked, not sent yet
};

} // namespace hvd_order
