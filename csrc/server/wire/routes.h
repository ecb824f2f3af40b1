#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "server/wire/registration.h"

namespace hvd_order {

/// By which way several workers' updates of a slice should come to its owner: one after the other,
/// or added up by another server.
///
/// What a transfer takes from its admission to its arrival says how full its line is: t to the
/// owner, and by a helper t + h, h of it to the helper. To send n updates straight costs n t, by
/// the helper n h + t. So a helper is worth its while if it takes less than t (2 - 1 / n) in all;
/// where all lines are equally full, none is. A way is tried when it is new, and when it has not
/// been taken for a while.
///
/// Thread safety: all methods may be called from any thread.
class Routes {
 public:
  static constexpr ServerId kDirect = kNoServer;

  /// For so many updates, the best of these helpers, or none of them: kDirect.
  [[nodiscard]] ServerId best(std::size_t updates, const std::vector<ServerId>& helpers) const;
  /// Updates have been admitted by that way.
  void taken(ServerId way);
  void took(ServerId way, double secondsPerByte);
  void gone(ServerId helper);

 private:
  // Admissions between two tries of a way that seems slow.
  static constexpr std::uint64_t kPatience = 256;
  static constexpr double kNewest = 0.25; // share of the newest measurement

  struct Way {
    double secondsPerByte = 0; // 0: unknown
    std::uint64_t taken = 0;   // when it was taken last; 0: never
  };

  mutable std::mutex mutex_; // guards what follows
  std::map<ServerId, Way> ways_;
  std::uint64_t admissions_ = 0;
};

} // namespace hvd_order
