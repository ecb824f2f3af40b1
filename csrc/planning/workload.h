#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "planning/rows.h"

namespace hvd_order::simulate {

/// An op's place in the program.
using OpIndex = std::uint32_t;

/// A parameter and its gradient. Its place in the list is its TensorId, so the list is in
/// consumption order.
struct Parameter {
  std::string name;
  ByteCount sizeBytes;      ///< size of the gradient as it is sent
  double updateSeconds = 0; ///< time of the optimizer for this parameter
  BufferId buffer = 0;      ///< gradient buffer; only tensors of one buffer share slices
};

/// A piece of computation of one step.
struct Op {
  std::string name;
  double seconds;
  std::vector<OpIndex> inputs;    ///< ops of the same step that must end first
  std::vector<TensorId> reads;    ///< parameters, updated by the step before
  std::vector<TensorId> produces; ///< gradients; ready when all ops that produce them have ended
  std::vector<TensorId> awaits;   ///< gradients of the same step, summed over all ranks
  std::uint32_t stream = 0;       ///< stream of the op; a stream runs one op at a time
};

/// The computation of one rank in a step: a graph of ops over parameters. Immutable.
///
/// An op that produces a gradient waits until the gradient of the last step has been applied, like
/// an op that reads the parameter, because both gradients use the same place in the buffer.
class Workload final {
 public:
  /// @throws InvalidUsage for a workload without ops, a negative or infinite time, a size that is
  ///   not positive, an unknown number, a cycle among the inputs, or a parameter for which no op
  ///   produces a gradient (leave out frozen parameters).
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

  /// Returns the same computation with each group of gradients merged into one. A group becomes
  /// one parameter in a buffer of its own; its number is the group's place. A group is cut only if
  /// it is larger than the slice size.
  /// @throws InvalidUsage unless each parameter is in exactly one group and no group is empty.
  [[nodiscard]] Workload merged(const std::vector<std::vector<TensorId>>& groups) const;

  /// Returns the groups that DDP makes: parameters in the order in which their gradients are
  /// ready. A bucket is full when it has reached `bucketBytes` (`firstBytes` for the first of each
  /// buffer). Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.
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
