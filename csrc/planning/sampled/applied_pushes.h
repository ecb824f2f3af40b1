#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planning/sampled/links/transfer_queue.h"
#include "planning/sampled/sampled_training.h"

namespace hvd_order::simulate {

/// Which pushes the servers have applied, and with that, which pulls they may answer.
///
/// With ServerMode::kSync all workers of a tensor have one number.
class AppliedPushes final {
 public:
  AppliedPushes(const SampledTraining& training, std::size_t tensors)
      : training_(training),
        byWorker_(tensors, std::vector<std::uint32_t>(training.slowness.size())),
        inRound_(tensors) {}

  /// A push has come to its server. @return whether the server may work on the tensor now.
  bool came(const Transfer& push) {
    if (training_.mode != ServerMode::kSync) {
      return true;
    }
    if (++inRound_[push.tensor] < byWorker_[push.tensor].size()) {
      return false;
    }
    inRound_[push.tensor] = 0;
    return true;
  }

  void count(TensorId tensor, std::uint32_t worker) {
    ++byWorker_[tensor][worker];
  }

  [[nodiscard]] std::uint32_t of(TensorId tensor, std::uint32_t worker) const {
    return byWorker_[tensor][worker];
  }

  [[nodiscard]] bool mayAnswer(const Transfer& pull) const {
    const auto& counts = byWorker_[pull.tensor];
    const std::uint32_t wanted = pull.step;
    if (training_.mode == ServerMode::kSync) {
      return counts[pull.worker] >= wanted;
    }
    if (!training_.staleness) {
      return true;
    }
    const std::uint32_t slowest = *std::min_element(counts.begin(), counts.end());
    return slowest + *training_.staleness >= wanted;
  }

 private:
  const SampledTraining& training_;
  std::vector<std::vector<std::uint32_t>> byWorker_; // by tensor and worker
  std::vector<std::uint32_t> inRound_;               // by tensor: pushes of the round, kSync
};

} // namespace hvd_order::simulate
