#pragma once

#include <cstdint>

#include "base/types.h"

namespace hvd_order::checker {

/// Something that happens on one rank. `what` is a model, a tensor, a slice or the sender.
struct Event {
  enum class Kind : std::uint8_t {
    kRegister, ///< the rank registers model `what`
    kReady,    ///< tensor `what` of `model` becomes ready
    kDeliver,  ///< the oldest message from rank `what` arrives
    kDone,     ///< slice `what` of `model` is summed
    kDecide,   ///< the rank decides (Setup::decidesLater)
    kHold,     ///< the rank stops issuing slices of the plan (Setup::leavesPlan)
    kEndPlan,  ///< all ranks have: the rank learns where the plan ends
    kReserve,  ///< a link reservation begins or ends on the rank (Setup::reserves)
    kDie,      ///< the rank's events stop
  };

  Kind kind;
  std::uint8_t model;
  std::int16_t rank;
  std::uint32_t what;

  friend bool operator==(const Event&, const Event&) = default;
};

} // namespace hvd_order::checker
