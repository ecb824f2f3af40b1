#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "scheduler/scheduler.h"

namespace hvd_order::simulate {

/// What an all-reduce of one slice costs. Alone it takes `latencyS + sliceCostS + bytes *
/// secondsPerByte`. The latency of a slice passes beside the transfers of others; the rest occupies
/// the link, which slices in flight share equally.
struct AllReduceCost {
  double latencyS = 0;
  double sliceCostS = 0;
  double secondsPerByte = 0;
  double sentPerByte = 1; ///< bytes that leave each rank for each byte of gradient
  /// How many slices the transport works on at a time, in the order of issue; 0 for all that are in
  /// flight. With 1 they follow each other, latency included, as on a stream of NCCL; Gloo has two
  /// threads.
  std::uint32_t lanes = 0;
};

/// Ring: 2 (n - 1) messages of a n-th of the slice one after the other.
/// Source: Patarasuk and Yuan, J. Parallel and Distributed Computing 69(2), 2009.
/// @param alphaS latency of a message; @param bytesPerS of every rank's link, each way.
/// @throws InvalidUsage if an argument makes no sense, as the next one.
AllReduceCost ringAllReduce(int ranks, double alphaS, double bytesPerS);

/// Two binary trees, each for half of the slice, up and down in a pipeline: 2 log2(n) messages
/// deep. An inner rank of one tree is a leaf of the other, so over all ranks as many bytes leave as
/// in a ring: 2 (n - 1) / n on average, which is what is charged. Source: Sanders, Speck and
/// Traeff, Parallel Computing 35(12), 2009.
AllReduceCost treeAllReduce(int ranks, double alphaS, double bytesPerS);

/// When workers fetch parameters from servers.
enum class Pull {
  kAtOnce,   ///< a server sends a slice as soon as it is updated (P3, section 4.2)
  kNextStep, ///< workers ask when their next step begins; a step ends when all is updated (TicTac)
};

/// Parameter servers, each with a full-duplex link. Slices go to them in turn (P3), unless said
/// otherwise.
struct ServerNetwork {
  int servers = 1;
  double latencyS = 0;             ///< of a push or pull, beside the transfers of others
  double workerBytesPerS = 1;      ///< each way
  double serverBytesPerS = 1;      ///< each way
  double updateSecondsPerByte = 0; ///< a server's own work once it has a slice from all workers
  double updateSecondsPerSlice = 0;
  Pull pull = Pull::kAtOnce;
  Policy pullPolicy = Policy::kPriority;
  ByteCount pullCreditBytes = 0;       ///< of each worker, from all servers
  std::vector<SliceIndex> pullPlan;    ///< for Policy::kPlanned
  std::vector<std::uint32_t> serverOf; ///< by slice; empty: in turn
};

} // namespace hvd_order::simulate
