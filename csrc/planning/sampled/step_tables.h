#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "planning/sampled/links/transfer_queue.h"
#include "planning/sampled/sampled_step.h"
#include "planning/sampled/sampled_training.h"

namespace hvd_order::simulate {

/// What a simulation asks for at each op, in little memory: a SampledOp has names and lists.
struct StepTables {
  StepTables(const SampledStep& step, const SampledTraining& training)
      : awaitsPushes(training.stepEnd != SampledStepEnd::kComputed), serverOf(training.serverOf) {
    const std::vector<ByteCount>& sizes = step.tensorBytes();
    for (TensorId tensor = 0; serverOf.size() < sizes.size(); ++tensor) {
      serverOf.push_back(tensor % training.servers);
    }
    for (OpIndex i = 0; i < step.ops().size(); ++i) {
      const SampledOp& op = step.ops()[i];
      kinds.push_back(op.kind);
      inputs.push_back(static_cast<std::uint32_t>(op.inputs.size()));
      const bool moves = op.kind != SampledKind::kCompute;
      transfers.push_back(
          {.worker = 0,
           .tensor = op.tensor,
           .step = 0,
           .priority = op.priority,
           .leftBytes = moves ? static_cast<double>(sizes[op.tensor]) : 0.0,
           .server = moves ? serverOf[op.tensor] : 0});
      awaited += isAwaited(i) ? 1 : 0;
    }
  }

  [[nodiscard]] bool isAwaited(OpIndex op) const {
    return kinds[op] != SampledKind::kPush || awaitsPushes;
  }

  bool awaitsPushes;
  std::size_t awaited = 0;             ///< ops that a step waits for
  std::vector<std::uint32_t> serverOf; ///< by tensor
  // By op.
  std::vector<SampledKind> kinds;
  std::vector<std::uint32_t> inputs; ///< number of them
  std::vector<Transfer> transfers;   ///< of pulls and pushes, without worker and step
};

} // namespace hvd_order::simulate
