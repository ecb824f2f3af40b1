#pragma once

#include <cstdint>

#include "server/arithmetic/update_rule.h"
#include "server/wire/frame.h"

// What the kinds of frames about slices make of a header's `argument`.
namespace hvd_order {

// kState and kPull: a state travels in parts, its counters, its value, then the optimizer's
// moments. The part is in the low half of a state's argument, with their number above it; in the
// high half of a pull's, with the worker below it if a server passes it on.
constexpr std::uint64_t kPartBits = 32;
constexpr std::uint32_t kCountersPart = 0;
constexpr std::uint32_t kValuePart = 1;
constexpr std::uint32_t kMostParts = 2 + kMostMoments;
// Marks a state, and the word that it has arrived, as a copy's: the original stays with its sender.
constexpr std::uint64_t kCopyMark = std::uint64_t{1} << 63;
// kReplicaDone: marks the word, to all servers, that owner and replica have the slice: who else has
// it may forget.
constexpr std::uint64_t kSafeMark = std::uint64_t{1} << 62;
// kRule: the number of the rules; `round` is the first for which they hold.
// kPush that a server passes on: whose it is, with the number of the latest rules above it.
// kReplica: the version that it leads to, with 1 + the worker above it, 0 for a whole round.
constexpr std::uint64_t kWorkerMask = 0xFFFFFFFF;
// kAdmit and kPush with kFrameFlagGroup, between worker and server: group.h says what. Between
// servers, a group's number is the round of kPush and kValue; the payloads of kPush and kReplica
// end with its members. Without that flag kAdmit has 0. kAsk: steps of the last answer. kValue:
// steps that it has seen; both count those before the model was registered.

} // namespace hvd_order
