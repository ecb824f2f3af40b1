#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"

namespace hvd_order {

/// The received bytes are not a frame that an honest peer would send now.
struct FrameError : Error {
  using Error::Error;
};

/// Purpose of a frame; the value is its number on the wire.
enum class FrameKind : std::uint8_t {
  kControl = 1, ///< JSON text for Python
  kPush,        ///< a worker's gradient of a slice
  kPull,        ///< asks for a slice's value
  kValue,       ///< an answer: a slice's sum or parameters
  kRule,        ///< hyper-parameters
  kState,       ///< a slice's value and optimizer state, moving to another server
  kReplica,     ///< an update that the owner made, for its replica
  kReplicaDone, ///< a copy or an update has arrived
  kLost,        ///< a rank is gone
  kLeave,       ///< the sender sends nothing more
  kModel,       ///< a model's slices, sent before their first push
  kMap,         ///< which server holds which slice from now on
  kSwitch,      ///< a worker sends no more frames by an older map
  kLate,        ///< asks which workers' pushes are missing; answered by a list of ranks
  kAsk,         ///< a worker requests to push a slice
  kAdmit,       ///< the server admits that push
  kGone,        ///< worker 0 counts a server (argument) as lost; the text says why
};
constexpr FrameKind kLastFrameKind = FrameKind::kGone;

/// Marks the answer to a push that was too late to be applied and was not sent.
constexpr std::uint16_t kFrameFlagLate = 1;
/// Marks a frame about the updates of several workers, which a helper adds (aggregator.h).
constexpr std::uint16_t kFrameFlagGroup = 2;
/// Marks a request of a worker that has no connection to the helper it was told to push to.
constexpr std::uint16_t kFrameFlagDirect = 4;
/// All flags that this version knows.
constexpr std::uint16_t kFrameFlags = kFrameFlagLate | kFrameFlagGroup | kFrameFlagDirect;

/// Header of a frame on a connection between worker and server, or between two servers. 64 bytes,
/// numbers little endian:
///
///     at   0      4        5     6      8        16      24     28      32     36     40
///          magic  version  kind  flags  session  number  model  layout  slice  round  map
///     at  44            52        60
///          payloadBytes  argument  check
///
/// `check` is the CRC-32C of the 60 bytes before it. It detects a header that is truncated or
/// mixed with another one. It does not cover the payload, which TCP protects.
struct FrameHeader {
  FrameKind kind = FrameKind::kControl;
  std::uint16_t flags = 0;
  std::uint64_t session = 0; ///< of this direction; known only to both ends of the connection
  std::uint64_t number = 0;  ///< counts the frames of one direction, from 0
  std::uint32_t model = 0;
  std::uint32_t layout = 0; ///< counts the model's layouts
  std::uint32_t slice = 0;
  std::uint32_t round = 0;
  std::uint32_t map = 0; ///< version of the sender's map of slices to servers
  std::uint64_t payloadBytes = 0;
  std::uint64_t argument = 0; ///< meaning depends on `kind` (arguments.h)

  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

constexpr std::size_t kFrameHeaderBytes = 64;

/// Requirements on the next frame of a connection.
struct FrameLimits {
  std::uint64_t session;
  std::uint64_t nextNumber;
  std::uint64_t largestPayload; ///< bytes
};

/// Writes the header with its check. Accepts any field values: the receiver validates them.
void write(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out);

/// Parses and checks a header. Model, layout, slice, round, map and argument may have any value.
/// @throws FrameError saying what is wrong: magic, version, check, kind, flags, session, a number
///   out of sequence (a frame was lost or came twice), or a payload that is longer than allowed.
///   The message reveals nothing of either session.
FrameHeader parse(std::span<const std::byte, kFrameHeaderBytes> bytes, const FrameLimits& limits);

/// CRC-32C (Castagnoli), as iSCSI and SSE 4.2 compute it.
std::uint32_t crc32c(std::span<const std::byte> bytes);

} // namespace hvd_order
