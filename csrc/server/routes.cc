#include "server/routes.h"

#include <limits>

namespace hvd_order {

void Routes::took(ServerId way, double secondsPerByte) {
  const std::scoped_lock lock(mutex_);
  double& known = ways_[way].secondsPerByte;
  known = known > 0 ? known + kNewest * (secondsPerByte - known) : secondsPerByte;
}

ServerId Routes::choose(const std::vector<ServerId>& helpers) {
  const std::scoped_lock lock(mutex_);
  ++choices_;
  ServerId best = kDirect;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](ServerId server) {
    const Way& way = ways_[server];
    const bool isDue = way.choice == 0 || choices_ - way.choice > kPatience;
    // One that has been tried, and from which nothing has come yet, is slower than any.
    const double seconds = isDue ? 0
        : way.secondsPerByte > 0 ? way.secondsPerByte
                                 : std::numeric_limits<double>::max();
    if (seconds < least) {
      least = seconds;
      best = server;
    }
  };
  consider(kDirect);
  for (const ServerId helper : helpers) {
    consider(helper);
  }
  ways_[best].choice = choices_;
  return best;
}

void Routes::gone(ServerId helper) {
  const std::scoped_lock lock(mutex_);
  ways_.erase(helper);
}

} // namespace hvd_order
