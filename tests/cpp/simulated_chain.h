#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "planning/simulator.h"

// Chains of layers to simulate, and times to compare. Times in these tests are in seconds, sizes in
// bytes; an AllReduceCost of 1 s a byte and tensors of 16 bytes would be slow to read, so most
// networks take one second for 64 bytes.

namespace hvd_order::simulate {

constexpr ByteCount kUnit = 64;
constexpr double kEps = 1e-9;

inline void checkNear(double actual, double expected, const char* text, const char* where) {
  if (!(std::abs(actual - expected) <= kEps * std::max(1.0, std::abs(expected)))) {
    throw test::Failure(concat(where, ": ", text, " is ", actual, ", expected ", expected));
  }
}

#define CHECK_NEAR(actual, expected) checkNear(actual, expected, #actual, HVDO_WHERE)

struct Layer {
  double forwardS;
  double backwardS;
  ByteCount bytes;
  double updateS = 0;
};

/// forward 0..n-1, backward n-1..0; tensor i is read by forward i and produced by backward i.
inline Workload chain(const std::vector<Layer>& layers) {
  std::vector<Op> ops;
  std::vector<Parameter> parameters;
  const auto count = static_cast<std::uint32_t>(layers.size());
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string name = concat("l", i);
    ops.push_back({.name = concat(name, ".forward"), .seconds = layers[i].forwardS, .reads = {i}});
    parameters.push_back({name, layers[i].bytes, layers[i].updateS});
  }
  for (std::uint32_t i = count; i-- > 0;) {
    ops.push_back(
        {.name = concat("l", i, ".backward"), .seconds = layers[i].backwardS, .produces = {i}});
  }
  for (std::uint32_t i = 1; i < ops.size(); ++i) {
    ops[i].inputs = {i - 1};
  }
  return {std::move(ops), std::move(parameters)};
}

/// One second for `kUnit` bytes and no latency.
inline AllReduceCost plainLink() {
  return {.secondsPerByte = 1.0 / kUnit};
}

inline Scenario
scenario(ByteCount sliceBytes, ByteCount creditBytes, AllReduceCost cost = plainLink()) {
  Scenario s;
  s.slowness = {1.0, 1.0};
  s.network = cost;
  s.sliceBytes = sliceBytes;
  s.creditBytes = creditBytes;
  return s;
}

inline const OpRecord&
opOf(const Result& result, const Workload& workload, int step, std::size_t op) {
  return result.devices[0].ops[static_cast<std::size_t>(step) * workload.ops().size() + op];
}

/// Some layers of sizes and times without a pattern.
inline std::vector<Layer> unevenLayers(int count) {
  std::vector<Layer> layers;
  for (int i = 0; i < count; ++i) {
    layers.push_back(
        {0.5 + 0.37 * (i * 7 % 5), 1.0 + 0.61 * (i * 11 % 7), kUnit / 4 * (1 + i * 13 % 17)});
  }
  return layers;
}

inline bool sameTimes(const Result& a, const Result& b) {
  return a.stepS == b.stepS && a.endS == b.endS && a.sentBytes == b.sentBytes;
}

} // namespace hvd_order::simulate
