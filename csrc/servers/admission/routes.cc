#include "servers/admission/routes.h"

#include <limits>

// Chooses by measurement, not by a plan of bandwidths (MLfabric plans;
// docs/guides/parameter-server.md).
//
// A way is a helper, or kDirect. For each way a moving average of the seconds per byte from a
// transfer's admission to its arrival is kept, and the number of the admission that last took it.
// `best` compares the ways by the rule in routes.h: a helper must take less than t (2 - 1 / n).
//
// A way counts as free of cost until it has been tried, and again when kPatience admissions have
// passed without it, so every way is tried now and then and a link that has become idle is found.
//
// Invariant: a helper that is tried for the first time counts as infinitely slow until its first
// measurement, so it gets no second group before that, or before it is due to be tried again.
namespace hvd_order {

ServerId Routes::best(std::size_t updates, const std::vector<ServerId>& helpers) const {
  const std::scoped_lock lock(mutex_);
  const auto secondsOf = [&](ServerId server) {
    const auto way = ways_.find(server);
    if (way == ways_.end() || admissions_ - way->second.taken > kPatience) {
      return 0.0; // due to be tried
    }
    // A way that is being tried for the first time has no measurement yet.
    return way->second.secondsPerByte > 0 ? way->second.secondsPerByte
                                          : std::numeric_limits<double>::max();
  };
  ServerId best = kDirect;
  double least = secondsOf(kDirect) * (2 - 1 / static_cast<double>(updates));
  for (const ServerId helper : helpers) {
    if (const double seconds = secondsOf(helper); seconds < least) {
      least = seconds;
      best = helper;
    }
  }
  return best;
}

void Routes::taken(ServerId way) {
  const std::scoped_lock lock(mutex_);
  ways_[way].taken = ++admissions_;
}

void Routes::took(ServerId way, double secondsPerByte) {
  const std::scoped_lock lock(mutex_);
  double& known = ways_[way].secondsPerByte;
  known = known > 0 ? known + kNewest * (secondsPerByte - known) : secondsPerByte;
}

void Routes::gone(ServerId helper) {
  const std::scoped_lock lock(mutex_);
  ways_.erase(helper);
}

} // namespace hvd_order
