#include "planning/workload.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/error.h"

// Checks a workload once, and inverts its relations, so that the simulation needs no searches.
//
// Ops list what they need and produce. The constructor derives the opposite direction: the
// successors of an op, and the users, producers and awaiters of a parameter. A user reads the
// parameter or produces its gradient. The rows are flat (rows.h) and in program order.
//
// Cycles are found by topological sorting: ops without open inputs end one after the other, and an
// op that never ends depends on itself.
//
// `buckets` follows DDP. The order of readiness is the program order of the last op that produces
// a gradient; within an op the last parameter comes first. A bucket closes once it has reached its
// limit, so it may exceed the limit by its last parameter.
//
// Invariants: all numbers in a Workload are valid and each list is sorted without duplicates;
// every parameter has a producer.
//
// Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.

namespace hvd_order::simulate {

namespace {

template <typename T>
void sortUnique(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

void checkSeconds(const char* what, const std::string& name, double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) {
    throw InvalidUsage(
        concat(what, " '", name, "' takes ", seconds, " s; a finite time of at least 0 is needed"));
  }
}

template <typename T>
void checkNumbers(
    const Op& op,
    const char* what,
    const std::vector<T>& numbers,
    std::size_t count,
    const char* of) {
  for (const T number : numbers) {
    if (number >= count) {
      throw InvalidUsage(
          concat("op '", op.name, "' ", what, " ", of, " ", number, "; there are ", count));
    }
  }
}

} // namespace

Workload::Workload(std::vector<Op> ops, std::vector<Parameter> parameters)
    : ops_(std::move(ops)), parameters_(std::move(parameters)) {
  check();
  std::vector<std::vector<OpIndex>> successors(ops_.size());
  std::vector<std::vector<OpIndex>> users(parameters_.size());
  std::vector<std::vector<OpIndex>> producers(parameters_.size());
  std::vector<std::vector<OpIndex>> awaiters(parameters_.size());
  for (OpIndex i = 0; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    sortUnique(op.inputs);
    sortUnique(op.reads);
    sortUnique(op.produces);
    sortUnique(op.awaits);
    streams_ = std::max(streams_, op.stream + 1);
    for (const OpIndex input : op.inputs) {
      successors[input].push_back(i);
    }
    for (const TensorId tensor : op.awaits) {
      awaiters[tensor].push_back(i);
    }
    for (const TensorId tensor : op.reads) {
      users[tensor].push_back(i);
    }
    for (const TensorId tensor : op.produces) {
      producers[tensor].push_back(i);
      if (!std::binary_search(op.reads.begin(), op.reads.end(), tensor)) {
        users[tensor].push_back(i);
      }
    }
  }
  for (TensorId tensor = 0; tensor < parameters_.size(); ++tensor) {
    if (producers[tensor].empty()) {
      throw InvalidUsage(concat(
          "no op produces a gradient for parameter '", parameters_[tensor].name,
          "'; leave out what is not trained"));
    }
  }
  successors_ = Rows<OpIndex>(successors);
  users_ = Rows<OpIndex>(users);
  producers_ = Rows<OpIndex>(producers);
  awaiters_ = Rows<OpIndex>(awaiters);
  checkNoCircle();
}

void Workload::check() const {
  if (ops_.empty()) {
    throw InvalidUsage("a step without ops takes no time; give at least one");
  }
  for (const Parameter& parameter : parameters_) {
    checkSeconds("the update of parameter", parameter.name, parameter.updateSeconds);
    if (parameter.sizeBytes <= 0) {
      throw InvalidUsage(concat(
          "parameter '", parameter.name, "' has ", parameter.sizeBytes,
          " bytes; a positive size is needed"));
    }
  }
  for (const Op& op : ops_) {
    checkSeconds("op", op.name, op.seconds);
    checkNumbers(op, "has as input op", op.inputs, ops_.size(), "number");
    checkNumbers(op, "reads parameter", op.reads, parameters_.size(), "number");
    checkNumbers(op, "produces gradient", op.produces, parameters_.size(), "number");
    checkNumbers(op, "awaits gradient", op.awaits, parameters_.size(), "number");
  }
}

void Workload::checkNoCircle() const {
  std::vector<std::size_t> inputsToGo;
  std::vector<OpIndex> ended;
  for (OpIndex i = 0; i < ops_.size(); ++i) {
    inputsToGo.push_back(ops_[i].inputs.size());
    if (ops_[i].inputs.empty()) {
      ended.push_back(i);
    }
  }
  for (std::size_t i = 0; i < ended.size(); ++i) {
    for (const OpIndex next : successors_[ended[i]]) {
      if (--inputsToGo[next] == 0) {
        ended.push_back(next);
      }
    }
  }
  for (OpIndex i = 0; i < ops_.size(); ++i) {
    if (inputsToGo[i] != 0) {
      throw InvalidUsage(
          concat("op '", ops_[i].name, "' needs its own result, through its inputs"));
    }
  }
}

Workload Workload::merged(const std::vector<std::vector<TensorId>>& groups) const {
  constexpr TensorId kNone = ~TensorId{0};
  std::vector<TensorId> groupOf(parameters_.size(), kNone);
  std::vector<Parameter> parameters;
  for (const std::vector<TensorId>& group : groups) {
    const auto number = static_cast<TensorId>(parameters.size());
    Parameter merged{.name = "", .sizeBytes = 0, .buffer = number};
    for (const TensorId tensor : group) {
      if (tensor >= groupOf.size() || groupOf[tensor] != kNone) {
        throw InvalidUsage(concat(
            "group ", number, " holds parameter number ", tensor,
            tensor < groupOf.size() ? ", and so does another" : ", which does not exist"));
      }
      groupOf[tensor] = number;
      merged.sizeBytes += parameters_[tensor].sizeBytes;
      merged.updateSeconds += parameters_[tensor].updateSeconds;
    }
    if (group.empty()) {
      throw InvalidUsage(concat("group ", number, " is empty"));
    }
    merged.name = parameters_[group.front()].name;
    if (group.size() > 1) {
      merged.name += ".." + parameters_[group.back()].name;
    }
    parameters.push_back(std::move(merged));
  }
  for (TensorId tensor = 0; tensor < groupOf.size(); ++tensor) {
    if (groupOf[tensor] == kNone) {
      throw InvalidUsage(concat("no group holds parameter '", parameters_[tensor].name, "'"));
    }
  }
  std::vector<Op> ops = ops_;
  for (Op& op : ops) {
    for (std::vector<TensorId>* const tensors : {&op.reads, &op.produces, &op.awaits}) {
      for (TensorId& tensor : *tensors) {
        tensor = groupOf[tensor];
      }
    }
  }
  return {std::move(ops), std::move(parameters)};
}

std::vector<std::vector<TensorId>> Workload::buckets(ByteCount firstBytes, ByteCount bucketBytes)
    const {
  if (firstBytes <= 0 || bucketBytes <= 0) {
    throw InvalidUsage(
        concat("buckets of ", firstBytes, " and ", bucketBytes, " bytes; both must be positive"));
  }
  std::vector<TensorId> ready(parameters_.size());
  std::iota(ready.rbegin(), ready.rend(), 0); // within an op the last parameter comes first
  std::stable_sort(ready.begin(), ready.end(), [this](TensorId a, TensorId b) {
    return producers_[a].back() < producers_[b].back();
  });
  struct Filling {
    std::size_t bucket;
    ByteCount filled;
    ByteCount limit;
  };
  std::vector<std::vector<TensorId>> groups;
  std::map<BufferId, Filling> fillings;
  for (const TensorId tensor : ready) {
    const Parameter& parameter = parameters_[tensor];
    Filling& now = fillings.try_emplace(parameter.buffer, Filling{0, 0, firstBytes}).first->second;
    if (now.filled == 0) {
      now.bucket = groups.size();
      groups.emplace_back();
    }
    groups[now.bucket].push_back(tensor);
    now.filled += parameter.sizeBytes;
    if (now.filled >= now.limit) {
      now.filled = 0;
      now.limit = bucketBytes;
    }
  }
  return groups;
}

} // namespace hvd_order::simulate
