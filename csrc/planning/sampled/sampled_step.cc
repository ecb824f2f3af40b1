#include "planning/sampled/sampled_step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace hvd_order::simulate {

SampledStep::SampledStep(
    std::vector<SampledOp> ops,
    std::vector<ByteCount> tensorBytes,
    std::vector<std::vector<double>> seconds,
    const std::vector<std::vector<OpIndex>>& pullOrders)
    : ops_(std::move(ops)),
      tensorBytes_(std::move(tensorBytes)),
      seconds_(std::move(seconds)),
      pullOf_(tensorBytes_.size(), kNone),
      pushOf_(tensorBytes_.size(), kNone) {
  check();
  std::vector<std::vector<OpIndex>> successors(ops_.size());
  std::vector<std::vector<OpIndex>> onStream;
  for (OpIndex i = 0; i < ops_.size(); ++i) {
    const SampledOp& op = ops_[i];
    for (const OpIndex input : op.inputs) {
      successors[input].push_back(i);
    }
    if (op.kind == SampledKind::kCompute) {
      onStream.resize(std::max<std::size_t>(onStream.size(), op.stream + 1));
      onStream[op.stream].push_back(i);
    } else {
      (op.kind == SampledKind::kPull ? pullOf_ : pushOf_)[op.tensor] = i;
    }
  }
  successors_ = Rows<OpIndex>(successors);
  onStream_ = Rows<OpIndex>(onStream);
  streams_ = static_cast<std::uint32_t>(onStream.size());
  checkNoCircle();
  setFirstOps(pullOrders);
}

void SampledStep::setFirstOps(const std::vector<std::vector<OpIndex>>& pullOrders) {
  std::vector<OpIndex> pulls;
  std::vector<OpIndex> others;
  for (OpIndex i = 0; i < ops_.size(); ++i) {
    if (ops_[i].inputs.empty()) {
      (ops_[i].kind == SampledKind::kPull ? pulls : others).push_back(i);
    }
  }
  if (pullOrders.empty()) {
    std::vector<OpIndex>& all = firstOps_.emplace_back(std::move(pulls));
    all.insert(all.end(), others.begin(), others.end());
    std::ranges::sort(all);
    return;
  }
  if (pullOrders.size() != seconds_.size()) {
    throw InvalidUsage(
        concat(pullOrders.size(), " orders of pulls for ", seconds_.size(), " measured steps"));
  }
  for (std::vector<OpIndex> order : pullOrders) {
    if (!std::ranges::is_permutation(order, pulls)) {
      throw InvalidUsage(concat(
          "an order of ", order.size(), " pulls is not one of the ", pulls.size(),
          " pulls without inputs"));
    }
    order.insert(order.end(), others.begin(), others.end());
    firstOps_.push_back(std::move(order));
  }
}

void SampledStep::check() const {
  if (ops_.empty()) {
    throw InvalidUsage("a step without ops");
  }
  if (seconds_.empty()) {
    throw InvalidUsage("no measured step; at least one is needed");
  }
  for (const ByteCount size : tensorBytes_) {
    if (size <= 0) {
      throw InvalidUsage(concat("a tensor of ", size, " bytes"));
    }
  }
  std::vector<bool> used(2 * tensorBytes_.size());
  for (const SampledOp& op : ops_) {
    for (const OpIndex input : op.inputs) {
      if (input >= ops_.size()) {
        throw InvalidUsage(concat("op '", op.name, "' has input ", input, "; there is none"));
      }
    }
    if (op.kind == SampledKind::kCompute) {
      continue;
    }
    if (op.tensor >= tensorBytes_.size()) {
      throw InvalidUsage(concat("op '", op.name, "' moves tensor ", op.tensor, "; there is none"));
    }
    const std::size_t place = 2 * op.tensor + (op.kind == SampledKind::kPush ? 1 : 0);
    if (used[place]) {
      throw InvalidUsage(concat("op '", op.name, "' moves a tensor that another op moves"));
    }
    used[place] = true;
  }
  for (const std::vector<double>& step : seconds_) {
    if (step.size() != ops_.size()) {
      throw InvalidUsage(concat("a measured step of ", step.size(), " ops of ", ops_.size()));
    }
    for (OpIndex i = 0; i < ops_.size(); ++i) {
      if (!std::isfinite(step[i]) || step[i] < 0) {
        throw InvalidUsage(concat("op '", ops_[i].name, "' takes ", step[i], " s"));
      }
    }
  }
}

void SampledStep::checkNoCircle() const {
  std::vector<std::size_t> toGo;
  std::vector<OpIndex> ready;
  for (OpIndex i = 0; i < ops_.size(); ++i) {
    toGo.push_back(ops_[i].inputs.size());
    if (toGo.back() == 0) {
      ready.push_back(i);
    }
  }
  std::size_t done = 0;
  for (; !ready.empty(); ++done) {
    const OpIndex op = ready.back();
    ready.pop_back();
    for (const OpIndex next : successors_[op]) {
      if (--toGo[next] == 0) {
        ready.push_back(next);
      }
    }
  }
  if (done < ops_.size()) {
    const auto waits = std::find_if(toGo.begin(), toGo.end(), [](auto left) { return left > 0; });
    throw InvalidUsage(concat(
        "op '", ops_[static_cast<std::size_t>(waits - toGo.begin())].name,
        "' is part of a circle, or behind one"));
  }
}

} // namespace hvd_order::simulate
