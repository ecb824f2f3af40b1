#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"

namespace hvd_order {

/// What came over a connection is no frame that an honest peer would send now.
struct FrameError : Error {
  using Error::Error;
};

/// What a frame is for; its number on the wire.
enum class FrameKind : std::uint8_t {
  kControl = 1, ///< JSON text for Python
  kPush,        ///< a worker's gradient of a slice
  kPull,        ///< asks for a slice's value
  kValue,       ///< the answer: a slice's sum or parameters
  kRule,        ///< hyper-parameters
  kState,       ///< a slice's value and optimizer state, moving to another server
  kReplica,     ///< a copy of them, for the server that would take over
  kReplicaDone, ///< the copy has arrived
  kLost,        ///< a rank is gone
  kLeave,       ///< the sender sends nothing more
  kModel,       ///< a model's slices, ahead of their first push
  kMap,         ///< which server holds which slice from now on
  kSwitch,      ///< a worker sends nothing more by an older map
  kLate,        ///< asks whose pushes are missing; the answer is a list of ranks
  kAsk,         ///< a worker wants to push a slice
  kAdmit,       ///< it may
  kGone,        ///< worker 0 counts a server as lost, its number the argument; the text says why
};
constexpr FrameKind kLastFrameKind = FrameKind::kGone;

/// An answer to a push that came too late to be made, so it has not been sent.
constexpr std::uint16_t kFrameFlagLate = 1;
/// About the updates of several workers, which a helper adds up (aggregator.h).
constexpr std::uint16_t kFrameFlagGroup = 2;
/// A worker that asks has no line to the helper that it was told to push to.
constexpr std::uint16_t kFrameFlagDirect = 4;
/// All flags that this version knows.
constexpr std::uint16_t kFrameFlags = kFrameFlagLate | kFrameFlagGroup | kFrameFlagDirect;

/// Says what follows on a connection between worker and server, or between two servers. As 64
/// bytes, numbers little endian:
///
///     at   0      4        5     6      8        16      24     28      32     36     40
///          magic  version  kind  flags  session  number  model  layout  slice  round  map
///     at  44            52        60
///          payloadBytes  argument  check
///
/// `check` is the CRC-32C of the 60 bytes before it, so it finds a header that was cut short or
/// mixed with another one. It does not cover the payload, which TCP guards.
struct FrameHeader {
  FrameKind kind = FrameKind::kControl;
  std::uint16_t flags = 0;
  std::uint64_t session = 0; ///< of this direction; known to both ends of the connection alone
  std::uint64_t number = 0;  ///< counts the frames of one direction, from 0
  std::uint32_t model = 0;
  std::uint32_t layout = 0; ///< counts the model's layouts
  std::uint32_t slice = 0;
  std::uint32_t round = 0;
  std::uint32_t map = 0; ///< version of the sender's map of slices to servers
  std::uint64_t payloadBytes = 0;
  std::uint64_t argument = 0; ///< what `kind` makes of it

  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

constexpr std::size_t kFrameHeaderBytes = 64;

/// What the next frame of a connection must keep to.
struct FrameLimits {
  std::uint64_t session;
  std::uint64_t nextNumber;
  std::uint64_t largestPayload; ///< bytes
};

/// Writes the header with its check. Takes any value: it is the receiver who judges.
void write(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out);

/// The header in `bytes`. Model, layout, slice, round, map and argument may have any value.
/// @throws FrameError saying what is wrong: magic, version, check, kind, flags, session, a number
///   out of sequence (a frame was lost or came twice), or a payload that is longer than allowed.
///   The message holds nothing of either session.
FrameHeader parse(std::span<const std::byte, kFrameHeaderBytes> bytes, const FrameLimits& limits);

/// CRC-32C (Castagnoli), as iSCSI and SSE 4.2 compute it.
std::uint32_t crc32c(std::span<const std::byte> bytes);

} // namespace hvd_order
