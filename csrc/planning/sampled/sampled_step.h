#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "planning/rows.h"
#include "planning/workload.h"

namespace hvd_order::simulate {

/// What an op of a sampled step does.
enum class SampledKind : std::uint8_t {
  kCompute,
  kPull, ///< the worker receives a parameter from its server
  kPush, ///< the worker sends a gradient to its server
};

/// A piece of a worker's step: computation, or the transfer of one tensor.
struct SampledOp {
  std::string name;
  SampledKind kind = SampledKind::kCompute;
  std::vector<OpIndex> inputs; ///< ops of the same step that must end first
  std::uint32_t stream = 0;    ///< of a computation; a stream runs one op at a time
  TensorId tensor = 0;         ///< of a transfer
  std::int32_t priority = 0;   ///< of a transfer; smaller is more urgent
};

/// A worker's step whose durations were measured several times. Immutable.
class SampledStep final {
 public:
  /// @param tensorBytes size of each tensor, by number.
  /// @param seconds by measured step and op: duration of each computation. Of transfers it is not
  ///   regarded.
  /// @param pullOrders by measured step: the ops of all pulls, in the order in which they are asked
  ///   for; none: in that of the ops.
  /// @throws InvalidUsage without ops or measured steps, and for an unknown number, a circle among
  ///   the inputs, a time that is negative or not finite, a size that is not positive, a tensor
  ///   that is pulled or pushed twice, or an order that is not one of all pulls.
  SampledStep(
      std::vector<SampledOp> ops,
      std::vector<ByteCount> tensorBytes,
      std::vector<std::vector<double>> seconds,
      const std::vector<std::vector<OpIndex>>& pullOrders = {});

  [[nodiscard]] const std::vector<SampledOp>& ops() const {
    return ops_;
  }
  [[nodiscard]] const std::vector<ByteCount>& tensorBytes() const {
    return tensorBytes_;
  }
  [[nodiscard]] std::size_t samples() const {
    return seconds_.size();
  }
  /// Duration of each op in a measured step.
  [[nodiscard]] std::span<const double> seconds(std::size_t sample) const {
    return seconds_[sample];
  }
  /// Ops without inputs, in the order in which a measured step starts them.
  [[nodiscard]] std::span<const OpIndex> firstOps(std::size_t sample) const {
    return firstOps_[firstOps_.size() == 1 ? 0 : sample];
  }
  [[nodiscard]] std::span<const OpIndex> successorsOf(OpIndex op) const {
    return successors_[op];
  }
  /// Computations of a stream, in program order.
  [[nodiscard]] std::span<const OpIndex> opsOfStream(std::uint32_t stream) const {
    return onStream_[stream];
  }
  [[nodiscard]] std::uint32_t streams() const {
    return streams_;
  }
  /// Number of the op that pulls each tensor; kNone: none does.
  [[nodiscard]] OpIndex pullOf(TensorId tensor) const {
    return pullOf_[tensor];
  }

  /// Number of the op that pushes each tensor; kNone: none does.
  [[nodiscard]] OpIndex pushOf(TensorId tensor) const {
    return pushOf_[tensor];
  }

  static constexpr OpIndex kNone = ~OpIndex{0};

 private:
  void check() const;
  void checkNoCircle() const;
  void setFirstOps(const std::vector<std::vector<OpIndex>>& pullOrders);

  std::vector<SampledOp> ops_;
  std::vector<ByteCount> tensorBytes_;
  std::vector<std::vector<double>> seconds_;
  std::vector<std::vector<OpIndex>> firstOps_; // by measured step, or one for all
  std::uint32_t streams_ = 1;
  Rows<OpIndex> successors_;
  Rows<OpIndex> onStream_;
  std::vector<OpIndex> pullOf_;
  std::vector<OpIndex> pushOf_;
};

} // namespace hvd_order::simulate
