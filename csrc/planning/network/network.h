#pragma once

#include <cstdint>

namespace hvd_order::simulate {

/// Cost of an all-reduce of one slice. Alone it takes `latencyS + sliceCostS + bytes *
/// secondsPerByte`. The latency of a slice overlaps the transfers of other slices. The rest
/// occupies the link, which the slices in flight share equally.
struct AllReduceCost {
  double latencyS = 0;
  double sliceCostS = 0;
  double secondsPerByte = 0;
  double sentPerByte = 1; ///< bytes that leave each rank for each byte of gradient
  /// Number of slices that the transport works on at once, in order of issue; 0: all slices in
  /// flight. With 1 slices follow each other, latency included, as on a stream of NCCL; Gloo has
  /// two threads.
  std::uint32_t lanes = 0;
};

/// Cost of a ring: 2 (n - 1) messages of 1/n of the slice, one after the other.
/// Source: Patarasuk and Yuan, J. Parallel and Distributed Computing 69(2), 2009.
/// @param alphaS latency of a message.
/// @param bytesPerS rate of every rank's link in each direction.
/// @throws InvalidUsage if `ranks` is below 1, `alphaS` is negative, `bytesPerS` is not positive,
/// or
///   one of them is not finite.
AllReduceCost ringAllReduce(int ranks, double alphaS, double bytesPerS);

/// Cost of two binary trees, each for half of the slice, up and down in a pipeline: 2 log2(n)
/// messages deep. An inner rank of one tree is a leaf of the other. So all ranks together send as
/// many bytes as in a ring: 2 (n - 1) / n for each byte on average, which is the cost used here.
/// Parameters and errors are those of ringAllReduce.
/// Source: Sanders, Speck and Traeff, Parallel Computing 35(12), 2009.
AllReduceCost treeAllReduce(int ranks, double alphaS, double bytesPerS);

/// Cost of either half of a split all-reduce: a ring's reduce-scatter is the first n - 1 of its
/// messages, the all-gather the other n - 1. So a half has half of the latency and of the bytes. It
/// is a collective of its own, so a slice costs as much in each half as in an all-reduce.
/// Source: Patarasuk and Yuan; Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing
/// Applications 19(1), 2005, for halves of log2(n) messages.
AllReduceCost halfOf(AllReduceCost allReduce);

} // namespace hvd_order::simulate
