#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "servers/wire/registration.h"

namespace hvd_order {

/// Chooses how several workers' updates of a slice reach its owner: directly, one after the other,
/// or added by a helper.
///
/// The time of a transfer from its admission to its arrival shows how busy the link is. It is t to
/// the owner; through a helper it is t + h, of which h is the part to the helper. Sending n
/// updates directly costs n t, and through the helper n h + t. So a helper pays off if it takes
/// less than t (2 - 1 / n) in all; where all links are equally busy, no helper does. A way is
/// tried when it is new, and when it has not been taken for a while.
///
/// Thread safety: all methods may be called from any thread.
class Routes {
 public:
  static constexpr ServerId kDirect = kNoServer;

  /// The best of these helpers for this number of updates, or kDirect if direct sending is best.
  [[nodiscard]] ServerId best(std::size_t updates, const std::vector<ServerId>& helpers) const;
  /// Records that updates have been admitted by this way.
  void taken(ServerId way);
  /// Records the measured time of a transfer by this way.
  void took(ServerId way, double secondsPerByte);
  void gone(ServerId helper);

 private:
  // Admissions between two tries of a way that seems slow.
  static constexpr std::uint64_t kPatience = 256;
  static constexpr double kNewest = 0.25; // weight of the newest measurement

  struct Way {
    double secondsPerByte = 0; // 0: unknown
    std::uint64_t taken = 0;   // admission at which it was last taken; 0: never
  };

  mutable std::mutex mutex_; // guards what follows
  std::map<ServerId, Way> ways_;
  std::uint64_t admissions_ = 0;
};

} // namespace hvd_order
