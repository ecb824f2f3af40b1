#include "simulate/sampled/shared_links.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace hvd_order::simulate {

SharedLinks::SharedLinks(
    std::size_t workers,
    std::size_t servers,
    double workerBytesPerS,
    double serverBytesPerS,
    Sharing sharing)
    : workerBytesPerS_(workerBytesPerS),
      serverBytesPerS_(serverBytesPerS),
      sharing_(sharing),
      workers_(workers),
      servers_(servers) {}

void SharedLinks::share(std::vector<Active>& active) {
  std::fill(workers_.begin(), workers_.end(), Link{workerBytesPerS_, 0, false});
  std::fill(servers_.begin(), servers_.end(), Link{serverBytesPerS_, 0, false});
  if (sharing_ == Sharing::kFair) {
    shareFairly(active);
  } else {
    shareInOrder(active);
  }
}

// The link that gives each of its connections the least fixes their rates; then the others share
// what is left, in the same way.
void SharedLinks::shareFairly(std::vector<Active>& active) {
  for (Active& each : active) {
    ++workers_[each.worker].toGo;
    ++servers_[each.server].toGo;
    each.rate = 0;
  }
  for (std::size_t toGo = active.size(); toGo > 0;) {
    double least = std::numeric_limits<double>::infinity();
    for (const std::vector<Link>* side : {&workers_, &servers_}) {
      for (const Link& link : *side) {
        if (link.toGo > 0) {
          least = std::min(least, link.spare / link.toGo);
        }
      }
    }
    // All links at the least share at once: equal workers are full at the same share.
    const double limit = least * (1 + 1e-12);
    for (std::vector<Link>* side : {&workers_, &servers_}) {
      for (Link& link : *side) {
        link.full = link.toGo > 0 && link.spare / link.toGo <= limit;
      }
    }
    for (Active& each : active) {
      if (each.rate > 0 || (!workers_[each.worker].full && !servers_[each.server].full)) {
        continue;
      }
      each.rate = least;
      --toGo;
      for (Link* link : {&workers_[each.worker], &servers_[each.server]}) {
        link->spare = std::max(link->spare - least, 0.0);
        --link->toGo;
      }
    }
  }
}

void SharedLinks::shareInOrder(std::vector<Active>& active) {
  order_.resize(active.size());
  std::iota(order_.begin(), order_.end(), 0U);
  std::sort(order_.begin(), order_.end(), [&](auto a, auto b) {
    return active[a].came < active[b].came;
  });
  for (const std::uint32_t i : order_) {
    Link& worker = workers_[active[i].worker];
    Link& server = servers_[active[i].server];
    active[i].rate = std::min(worker.spare, server.spare);
    worker.spare -= active[i].rate;
    server.spare -= active[i].rate;
  }
}

} // namespace hvd_order::simulate
