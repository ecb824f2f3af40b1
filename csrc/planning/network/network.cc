#include "planning/network/network.h"

#include <bit>
#include <cmath>

#include "base/error.h"

namespace hvd_order::simulate {

namespace {

AllReduceCost allReduce(int ranks, double alphaS, double bytesPerS, double messages) {
  if (ranks < 1) {
    throw InvalidUsage(concat("an all-reduce of ", ranks, " ranks; at least 1 is needed"));
  }
  if (!std::isfinite(alphaS) || alphaS < 0 || !std::isfinite(bytesPerS) || bytesPerS <= 0) {
    throw InvalidUsage(concat(
        "a link of ", bytesPerS, " bytes/s and ", alphaS,
        " s latency; the first must be positive, the second at least 0"));
  }
  const double sent = 2.0 * (ranks - 1) / ranks;
  return {.latencyS = messages * alphaS, .secondsPerByte = sent / bytesPerS, .sentPerByte = sent};
}

} // namespace

AllReduceCost ringAllReduce(int ranks, double alphaS, double bytesPerS) {
  return allReduce(ranks, alphaS, bytesPerS, 2.0 * (ranks - 1));
}

AllReduceCost treeAllReduce(int ranks, double alphaS, double bytesPerS) {
  const auto depth = std::bit_width(static_cast<unsigned>(ranks - 1)); // log2, rounded up
  return allReduce(ranks, alphaS, bytesPerS, 2.0 * depth);
}

AllReduceCost halfOf(AllReduceCost allReduce) {
  allReduce.latencyS /= 2;
  allReduce.secondsPerByte /= 2;
  allReduce.sentPerByte /= 2;
  return allReduce;
}

} // namespace hvd_order::simulate
