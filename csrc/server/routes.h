#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "server/registration.h"

namespace hvd_order {

/// By which way several workers' updates of a slice should come to its owner: one after the other,
/// or added up by another server.
///
/// What a way takes is measured, for each update and byte, from its admission to its arrival, so
/// with all that is on these lines besides: a helper that has much to do is slow, and is left
/// alone. A way is tried when it is new, and when it has not been taken for a while.
///
/// Thread safety: all methods may be called from any thread.
class Routes {
 public:
  static constexpr ServerId kDirect = kNoServer;

  void took(ServerId way, double secondsPerByte);
  /// The best of these helpers, or none of them: kDirect.
  ServerId choose(const std::vector<ServerId>& helpers);
  void gone(ServerId helper);

 private:
  // Choices between two tries of a way that seems slow.
  static constexpr std::uint64_t kPatience = 64;
  static constexpr double kNewest = 0.25; // share of the newest measurement

  struct Way {
    double secondsPerByte = 0; // 0: unknown
    std::uint64_t choice = 0;  // when it was chosen last; 0: never
  };

  std::mutex mutex_; // guards what follows
  std::map<ServerId, Way> ways_;
  std::uint64_t choices_ = 0;
};

} // namespace hvd_order
