#pragma once

#include <cstdint>

#include "servers/arithmetic/update_rule.h"
#include "servers/wire/frame.h"

// Meaning of a header's `argument` by kind of frame, for frames about slices.
namespace hvd_order {

// kState and kPull: a state travels in parts: its counters, its value, then the optimizer's
// moments. In a kState the low half is the part and the high half the number of parts. In a kPull
// the high half is the part; the low half is the worker if a server passes the pull on.
constexpr std::uint64_t kPartBits = 32;
constexpr std::uint32_t kCountersPart = 0;
constexpr std::uint32_t kValuePart = 1;
constexpr std::uint32_t kMostParts = 2 + kMostMoments;
// Marks a state, and the message that it has arrived, as a copy: the original stays with the
// sender.
constexpr std::uint64_t kCopyMark = std::uint64_t{1} << 63;
// kReplicaDone: marks the message to all servers that owner and replica have the slice; any other
// server may drop its copy.
constexpr std::uint64_t kSafeMark = std::uint64_t{1} << 62;
// kRule: the number of the rules; `round` is the first round for which they hold.
// kPush that a server passes on: the worker in the low half, the number of the latest rules in the
// high half.
// kReplica: the version after the update in the low half; 1 + the worker in the high half, 0 for a
// whole round.
constexpr std::uint64_t kWorkerMask = 0xFFFFFFFF;
// kAdmit and kPush with kFrameFlagGroup, between worker and server: see GroupOf in group.h.
// Between servers, the round of kPush and kValue is the group's number, and the payloads of kPush
// and kReplica end with the members. Without that flag kAdmit has 0.
// kAsk: steps of the last answer. kValue: steps that the value includes. Both counts include the
// steps before the model was registered. The `map` of a kValue that a slice's owner sends to a
// worker is the part: an answer to one pull must not be taken for that to the next.

} // namespace hvd_order
