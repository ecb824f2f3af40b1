#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "servers/arithmetic/update_rule.h"
#include "servers/wire/bytes.h"

namespace hvd_order {

/// Number of a server. A job's first server is 0; no number is used twice.
using ServerId = std::uint16_t;
constexpr ServerId kNoServer = 0xFFFF;

/// Model number of tensors that belong to no model; a header's `argument` identifies the tensor.
constexpr ModelId kNoModel = ~ModelId{0};

/// Round of a slice: the number of its push since its model was registered; the first is 1.
using Round = std::uint32_t;

/// Number of a set of rules that worker 0 has given for a model; the first is 1. The first round of
/// a set does not identify it: worker 0 may change the rules again before it pushes.
using RulesNumber = std::uint32_t;

/// Elements of a slice that are parameters with the same hyper-parameters.
struct Segment {
  std::uint32_t first; // element of the slice
  std::uint32_t count;
  std::uint32_t group; // index into the rules
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// Description of a slice for a server.
struct SliceShape {
  std::uint32_t sizeBytes;
  ElementType type;
  std::vector<Segment> segments; // ascending, disjoint; empty where workers update
  friend bool operator==(const SliceShape&, const SliceShape&) = default;
};

/// The server that holds a slice, and the one that could take over; kNoServer: none.
struct SliceOwners {
  ServerId owner;
  ServerId replica;
  friend bool operator==(const SliceOwners&, const SliceOwners&) = default;
};

/// The slices of a model, as every worker announces them before its first push.
struct Registration {
  bool serversUpdate = false; // else servers answer with sums
  std::vector<SliceShape> slices;
  friend bool operator==(const Registration&, const Registration&) = default;
};

/// Conversion to and from payloads. The readers check every number against its limits.
/// @throws FrameError from the readers: the payload is malformed; `largestSlice` is in bytes.
std::vector<std::byte> writeRegistration(const Registration& registration);
Registration readRegistration(std::span<const std::byte> payload, std::size_t largestSlice);
std::vector<std::byte> writeOwners(std::span<const SliceOwners> owners);
std::vector<SliceOwners> readOwners(std::span<const std::byte> payload);
std::vector<std::byte> writeRules(std::span<const UpdateRule> rules);
std::vector<UpdateRule> readRules(std::span<const std::byte> payload);

} // namespace hvd_order
