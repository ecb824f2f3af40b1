#include "servers/wire/registration.h"

#include "base/error.h"
#include "base/types.h"

namespace hvd_order {

namespace {

enum RuleFlag : std::uint32_t { kNesterov = 1, kAmsgrad = 2, kCentered = 4, kMaximize = 8 };
constexpr std::size_t kRuleBytes = 2 * 4 + 10 * 8;
constexpr std::size_t kSegmentBytes = 3 * sizeof(std::uint32_t);
constexpr std::size_t kLeastSliceBytes = 3 * sizeof(std::uint32_t);

// Reads a number of items of at least `bytesEach` bytes each. A number of items that the payload
// cannot hold is refused, because it must not decide how much memory is allocated.
std::uint32_t count(ByteReader& in, std::size_t bytesEach, const char* what) {
  const auto number = in.get<std::uint32_t>();
  if (number > in.left() / bytesEach) {
    throw FrameError(concat(number, " ", what, " in ", in.left(), " bytes"));
  }
  return number;
}

SliceShape readSlice(ByteReader& in, std::size_t largestSlice, bool serversUpdate) {
  SliceShape slice{};
  slice.sizeBytes = in.get<std::uint32_t>();
  const auto type = in.get<std::uint32_t>();
  if (type > static_cast<std::uint32_t>(ElementType::kBfloat16)) {
    throw FrameError(concat("unknown element type ", type));
  }
  slice.type = static_cast<ElementType>(type);
  const auto element = static_cast<std::uint32_t>(sizeOf(slice.type));
  if (slice.sizeBytes == 0 || slice.sizeBytes > largestSlice || slice.sizeBytes % element != 0) {
    throw FrameError(concat(
        "a slice of ", slice.sizeBytes, " bytes, in elements of ", element, "; the largest has ",
        largestSlice));
  }
  const std::uint64_t elements = slice.sizeBytes / element;
  std::uint64_t end = 0;
  for (std::uint32_t left = count(in, kSegmentBytes, "segments"); left > 0; --left) {
    Segment segment{};
    segment.first = in.get<std::uint32_t>();
    segment.count = in.get<std::uint32_t>();
    segment.group = in.get<std::uint32_t>();
    if (segment.first < end || std::uint64_t{segment.first} + segment.count > elements) {
      throw FrameError(concat(
          "a segment of ", segment.count, " elements at ", segment.first, " in a slice of ",
          elements));
    }
    end = std::uint64_t{segment.first} + segment.count;
    slice.segments.push_back(segment);
  }
  if (serversUpdate && slice.type != ElementType::kFloat32) {
    throw FrameError("servers update parameters of float32 only");
  }
  return slice;
}

} // namespace

std::vector<std::byte> writeRegistration(const Registration& registration) {
  ByteWriter out;
  out.put(std::uint32_t{registration.serversUpdate});
  out.put(static_cast<std::uint32_t>(registration.slices.size()));
  for (const SliceShape& slice : registration.slices) {
    out.put(slice.sizeBytes);
    out.put(static_cast<std::uint32_t>(slice.type));
    out.put(static_cast<std::uint32_t>(slice.segments.size()));
    for (const Segment& segment : slice.segments) {
      out.put(segment.first);
      out.put(segment.count);
      out.put(segment.group);
    }
  }
  return out.bytes();
}

Registration readRegistration(std::span<const std::byte> payload, std::size_t largestSlice) {
  ByteReader in(payload);
  Registration registration{};
  const auto serversUpdate = in.get<std::uint32_t>();
  if (serversUpdate > 1) {
    throw FrameError("a registration that is none");
  }
  registration.serversUpdate = serversUpdate == 1;
  const std::uint32_t slices = count(in, kLeastSliceBytes, "slices");
  if (slices > SliceKey::kMaxSlices) {
    throw FrameError(concat(slices, " slices"));
  }
  for (std::uint32_t left = slices; left > 0; --left) {
    registration.slices.push_back(readSlice(in, largestSlice, registration.serversUpdate));
  }
  in.finish();
  return registration;
}

std::vector<std::byte> writeOwners(std::span<const SliceOwners> owners) {
  ByteWriter out;
  for (const SliceOwners& slice : owners) {
    out.put(slice.owner);
    out.put(slice.replica);
  }
  return out.bytes();
}

std::vector<SliceOwners> readOwners(std::span<const std::byte> payload) {
  ByteReader in(payload);
  std::vector<SliceOwners> owners(payload.size() / sizeof(SliceOwners));
  for (SliceOwners& slice : owners) {
    slice.owner = in.get<ServerId>();
    slice.replica = in.get<ServerId>();
    if (slice.owner == kNoServer || slice.owner == slice.replica) {
      throw FrameError("a slice without an owner, or with its owner as the replica");
    }
  }
  in.finish();
  return owners;
}

std::vector<std::byte> writeRules(std::span<const UpdateRule> rules) {
  ByteWriter out;
  for (const UpdateRule& rule : rules) {
    out.put(static_cast<std::uint32_t>(rule.kind));
    out.put(
        (rule.nesterov ? kNesterov : 0U) | (rule.amsgrad ? kAmsgrad : 0U) |
        (rule.centered ? kCentered : 0U) | (rule.maximize ? kMaximize : 0U));
    for (const double number :
         {rule.lr, rule.weightDecay, rule.momentum, rule.dampening, rule.beta1, rule.beta2,
          rule.eps, rule.alpha, rule.lrDecay, rule.initialAccumulator}) {
      out.put(number);
    }
  }
  return out.bytes();
}

std::vector<UpdateRule> readRules(std::span<const std::byte> payload) {
  ByteReader in(payload);
  std::vector<UpdateRule> rules(payload.size() / kRuleBytes);
  for (UpdateRule& rule : rules) {
    const auto kind = in.get<std::uint32_t>();
    if (kind > static_cast<std::uint32_t>(RuleKind::kRmsprop)) {
      throw FrameError(concat("unknown update rule ", kind));
    }
    rule.kind = static_cast<RuleKind>(kind);
    const auto flags = in.get<std::uint32_t>();
    rule.nesterov = (flags & kNesterov) != 0;
    rule.amsgrad = (flags & kAmsgrad) != 0;
    rule.centered = (flags & kCentered) != 0;
    rule.maximize = (flags & kMaximize) != 0;
    for (double* number :
         {&rule.lr, &rule.weightDecay, &rule.momentum, &rule.dampening, &rule.beta1, &rule.beta2,
          &rule.eps, &rule.alpha, &rule.lrDecay, &rule.initialAccumulator}) {
      *number = in.getDouble();
    }
  }
  in.finish();
  return rules;
}

} // namespace hvd_order
