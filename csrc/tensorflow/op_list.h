#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensorflow/collective_calls.h"
#include "tensorflow/gradient_ops.h"

// The operators as both interfaces register them: name, inputs, outputs, the attributes that a
// kernel reads, and the function that runs.

namespace hvd_order::tensorflow {

/// Attributes of one operator of a graph; attributes that the operator does not have keep their
/// defaults.
struct Attributes {
  hvdo_position position{0, 0};
  std::int64_t description = 0;
  std::int64_t turns = 0;
  int dtype = 0;
  std::vector<std::int64_t> shape;
};

struct OpEntry {
  const char* name;
  std::vector<const char*> attributes;
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
  void (*run)(std::unique_ptr<OpContext> context, const Attributes& attributes);
};

/// All operators. All are stateful, so TensorFlow neither drops, merges nor precomputes them.
inline const std::vector<OpEntry>& opList() {
  static const std::vector<OpEntry> list = {
      {"HvdOrderPost",
       {"T: type", "exchange: int", "position: int"},
       {"variable: resource", "gradient: T"},
       {},
       [](std::unique_ptr<OpContext> context, const Attributes& a) {
         postGradient(std::move(context), a.position);
       }},
      {"HvdOrderTake",
       {"T: type", "shape: list(int)", "exchange: int", "position: int"},
       {"variable: resource"},
       {"sum: T"},
       [](std::unique_ptr<OpContext> context, const Attributes& a) {
         takeGradient(std::move(context), a.position, a.dtype, a.shape);
       }},
      {"HvdOrderReduce",
       {"T: type", "exchange: int", "position: int"},
       {"variable: resource", "gradient: T"},
       {"sum: T"},
       [](std::unique_ptr<OpContext> context, const Attributes& a) {
         reduceGradient(std::move(context), a.position);
       }},
      {"HvdOrderCollective",
       {"Tin: list(type) >= 0", "Tout: list(type) >= 0", "turns: int >= 0", "description: int"},
       {"tensors: Tin", "order: turns * resource"},
       {"results: Tout"},
       [](std::unique_ptr<OpContext> context, const Attributes& a) {
         CollectiveCalls::instance().submit(std::move(context), a.description, a.turns);
       }},
  };
  return list;
}

/// Name in a declaration: "gradient" for "gradient: T".
inline std::string nameOf(const std::string& declaration) {
  return declaration.substr(0, declaration.find(':'));
}

} // namespace hvd_order::tensorflow
