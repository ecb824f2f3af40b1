#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "simulate/rows.h"

namespace hvd_order::simulate {

/// An op's place in the program.
using OpIndex = std::uint32_t;

/// A parameter and its gradient; its place in the list is its TensorId, so the list is in
/// consumption order.
struct Parameter {
  std::string name;
  ByteCount sizeBytes;      ///< of the gradient as it travels
  double updateSeconds = 0; ///< of the optimizer, for this parameter
  BufferId buffer = 0;      ///< gradient buffer; only tensors of one buffer share slices
};

/// A piece of computation of one step.
struct Op {
  std::string name;
  double seconds;
  std::vector<OpIndex> inputs;    ///< ops of the same step that have to end first
  std::vector<TensorId> reads;    ///< parameters, updated by the step before
  std::vector<TensorId> produces; ///< gradients; one is ready when all ops that produce it ended
  std::vector<TensorId> awaits;   ///< gradients of the same step, summed over all ranks
  std::uint32_t stream = 0;       ///< where it runs; a stream runs one op at a time
};

/// What one rank computes in a step: a graph of ops over parameters. Immutable.
///
/// An op that produces a gradient waits, like one that reads the parameter, until the gradient of
/// the step before has been applied: it needs its place in the buffer.
class Workload final {
 public:
  /// @throws InvalidUsage on a negative time, an unknown number, a circle among the inputs, or a
  ///   parameter that no op produces a gradient for (leave frozen ones out).
  Workload(std::vector<Op> ops, std::vector<Parameter> parameters);

  [[nodiscard]] const std::vector<Op>& ops() const {
    return ops_;
  }
  [[nodiscard]] const std::vector<Parameter>& parameters() const {
    return parameters_;
  }
  [[nodiscard]] std::uint32_t streams() const {
    return streams_;
  }
  /// Ops that have `op` among their inputs.
  [[nodiscard]] std::span<const OpIndex> successorsOf(OpIndex op) const {
    return successors_[op];
  }
  /// Ops that read the parameter or produce its gradient, in program order.
  [[nodiscard]] std::span<const OpIndex> usersOf(TensorId tensor) const {
    return users_[tensor];
  }
  [[nodiscard]] std::span<const OpIndex> producersOf(TensorId tensor) const {
    return producers_[tensor];
  }
  [[nodiscard]] std::span<const OpIndex> awaitersOf(TensorId tensor) const {
    return awaiters_[tensor];
  }

  /// The same computation with gradients that travel together. Each group is one parameter, in a
  /// buffer of its own; its number is the group's place. A group is not cut as long as slices are
  /// not smaller.
  /// @throws InvalidUsage unless each parameter is in one group.
  [[nodiscard]] Workload merged(const std::vector<std::vector<TensorId>>& groups) const;

  /// Groups as DDP makes them: parameters in the order in which their gradients are ready, a bucket
  /// being full when it has reached `bucketBytes` (`firstBytes` for the first of each buffer).
  /// Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.
  [[nodiscard]] std::vector<std::vector<TensorId>> buckets(
      ByteCount firstBytes,
      ByteCount bucketBytes) const;

 private:
  void check() const;
  void checkNoCircle() const;

  std::vector<Op> ops_;
  std::vector<Parameter> parameters_;
  std::uint32_t streams_ = 1;
  Rows<OpIndex> successors_;
  Rows<OpIndex> users_;
  Rows<OpIndex> producers_;
  Rows<OpIndex> awaiters_;
};

} // namespace hvd_order::simulate
