#include "planning/sampled/links/shared_links.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

// Rates of connections between workers and servers, computed again after each change (the rule:
// shared_links.h).
//
// If all servers together give no worker more than its link carries (`even_`), no worker's link can
// be full: only servers that were touched have new rates. Else all servers are fixed anew, and the
// connections of those that remain are filled one by one (`collect`, `fill`). A server's
// connections are in no order, so that one that ends can give its place to the last.
//
// Invariant: a connection moves at its server's rate unless it is one of `exceptions_`.

namespace hvd_order::simulate {

namespace {

constexpr std::uint32_t kIdle = ~std::uint32_t{0};
constexpr std::uint64_t kNone = ~std::uint64_t{0};
// Links whose shares differ by rounding alone are full at once: equal workers have equal rates.
constexpr double kSame = 1 + 1e-12;

} // namespace

SharedLinks::SharedLinks(
    std::uint32_t workers,
    std::uint32_t servers,
    double workerBytesPerS,
    double serverBytesPerS,
    Sharing sharing,
    std::uint32_t others)
    : workers_(workers),
      workerBytesPerS_(workerBytesPerS),
      serverBytesPerS_(serverBytesPerS),
      sharing_(sharing),
      isTouched_(servers),
      evenly_(servers),
      rates_(servers),
      active_(servers),
      places_(std::size_t{workers + others} * servers, kIdle),
      came_(sharing == Sharing::kFifo ? places_.size() : 0, kNone),
      workerLinks_(workers + others),
      serverLinks_(servers) {}

void SharedLinks::activate(const Route& route) {
  std::vector<Route>& active = active_[route.server];
  places_[route.number] = static_cast<std::uint32_t>(active.size());
  active.push_back(route);
  touch(route.server);
}

void SharedLinks::deactivate(const Route& route) {
  std::vector<Route>& active = active_[route.server];
  const std::uint32_t place = std::exchange(places_[route.number], kIdle);
  if (place + 1 < active.size()) {
    active[place] = active.back();
    places_[active[place].number] = place;
  }
  active.pop_back();
  touch(route.server);
  if (sharing_ == Sharing::kFifo) {
    removeTurn(route);
  }
}

void SharedLinks::touch(std::uint32_t server) {
  shared_ = false;
  if (!isTouched_[server]) {
    isTouched_[server] = true;
    touched_.push_back(server);
  }
}

void SharedLinks::turnTo(const Route& route, std::uint64_t came) {
  if (sharing_ == Sharing::kFair) {
    return;
  }
  removeTurn(route);
  const auto place = std::upper_bound(
      turns_.begin(), turns_.end(), came, [](auto a, const Turn& b) { return a < b.came; });
  turns_.insert(place, {came, route});
  came_[route.number] = came;
  shared_ = false;
}

void SharedLinks::removeTurn(const Route& route) {
  const std::uint64_t came = std::exchange(came_[route.number], kNone);
  if (came != kNone) {
    turns_.erase(std::lower_bound(turns_.begin(), turns_.end(), came, [](const Turn& a, auto b) {
      return a.came < b;
    }));
  }
}

bool SharedLinks::share() {
  if (std::exchange(shared_, true)) {
    return false;
  }
  exceptions_.clear();
  changed_.clear();
  if (sharing_ == Sharing::kFair) {
    shareFairly();
  } else {
    shareInOrder();
  }
  for (const std::uint32_t server : touched_) {
    isTouched_[server] = false;
  }
  touched_.clear();
  return true;
}

void SharedLinks::shareFairly() {
  for (const std::uint32_t server : touched_) {
    const std::size_t count = active_[server].size();
    evenly_[server] = count > 0 ? serverBytesPerS_ / static_cast<double>(count) : 0.0;
  }
  const double all = std::accumulate(evenly_.begin(), evenly_.end(), 0.0);
  const bool wasEven = std::exchange(even_, all <= workerBytesPerS_ * kSame);
  if (even_ && wasEven) { // no worker's link can be full
    for (const std::uint32_t server : touched_) {
      rates_[server] = evenly_[server];
      changed_.push_back(server);
    }
    return;
  }
  rates_ = evenly_;
  changed_.resize(rates_.size());
  std::iota(changed_.begin(), changed_.end(), 0U);
  if (!even_) {
    shareUnevenly();
  }
}

void SharedLinks::shareUnevenly() {
  byShare_.clear();
  for (std::uint32_t server = 0; server < rates_.size(); ++server) {
    if (!active_[server].empty()) {
      byShare_.push_back(server);
    }
  }
  std::sort(byShare_.begin(), byShare_.end(), [&](auto a, auto b) {
    return rates_[a] != rates_[b] ? rates_[a] < rates_[b] : a < b;
  });
  double spare = workerBytesPerS_;
  std::size_t fixed = 0;
  for (; fixed < byShare_.size(); ++fixed) {
    const double rate = rates_[byShare_[fixed]];
    if (rate * static_cast<double>(byShare_.size() - fixed) > spare * kSame) {
      break;
    }
    spare -= rate;
  }
  const std::span<const std::uint32_t> servers(byShare_);
  collect(servers.first(fixed), servers.subspan(fixed));
  while (!toGo_.empty()) {
    fill(servers.subspan(fixed));
  }
}

/// Lists the connections of the rest, and what the fixed servers leave of their workers' links.
void SharedLinks::collect(
    std::span<const std::uint32_t> fixed,
    std::span<const std::uint32_t> rest) {
  met_.clear();
  for (const std::uint32_t server : rest) {
    const std::vector<Route>& active = active_[server];
    serverLinks_[server] = {serverBytesPerS_, 0, static_cast<std::uint32_t>(active.size())};
    toGo_.insert(toGo_.end(), active.begin(), active.end());
  }
  for (const Route& route : toGo_) {
    Link& link = workerLinks_[route.worker];
    if (link.toGo++ > 0) {
      continue;
    }
    met_.push_back(route.worker);
    link.spare = linkOf(route.worker);
    for (const std::uint32_t server : fixed) {
      if (places_[route.number - route.server + server] != kIdle) {
        link.spare = std::max(link.spare - rates_[server], 0.0);
      }
    }
  }
}

/// Gives a rate to the connections of the links that are full first.
void SharedLinks::fill(std::span<const std::uint32_t> rest) {
  double least = std::numeric_limits<double>::infinity();
  const auto lower = [&least](Link& link) {
    link.share = link.toGo > 0 ? link.spare / link.toGo : std::numeric_limits<double>::infinity();
    least = std::min(least, link.share);
  };
  for (const std::uint32_t worker : met_) {
    lower(workerLinks_[worker]);
  }
  for (const std::uint32_t server : rest) {
    lower(serverLinks_[server]);
  }
  const double limit = least * kSame;
  for (const std::uint32_t server : rest) {
    if (serverLinks_[server].share <= limit) {
      rates_[server] = least;
    }
  }
  std::size_t kept = 0;
  for (const Route& route : toGo_) {
    Link& worker = workerLinks_[route.worker];
    Link& server = serverLinks_[route.server];
    if (std::min(worker.share, server.share) > limit) {
      toGo_[kept++] = route;
      continue;
    }
    if (server.share > limit) {
      exceptions_.push_back({route, least});
    }
    for (Link* link : {&worker, &server}) {
      link->spare = std::max(link->spare - least, 0.0);
      --link->toGo;
    }
  }
  toGo_.resize(kept);
}

void SharedLinks::shareInOrder() {
  for (std::uint32_t worker = 0; worker < workerLinks_.size(); ++worker) {
    workerLinks_[worker] = Link{linkOf(worker)};
  }
  std::fill(serverLinks_.begin(), serverLinks_.end(), Link{serverBytesPerS_});
  auto open = std::count_if(
      active_.begin(), active_.end(), [](const auto& active) { return !active.empty(); });
  for (const Turn& turn : turns_) {
    Link& worker = workerLinks_[turn.route.worker];
    Link& server = serverLinks_[turn.route.server];
    const double rate = std::min(worker.spare, server.spare);
    if (rate <= 0) {
      continue;
    }
    exceptions_.push_back({turn.route, rate});
    worker.spare -= rate;
    server.spare -= rate;
    if (server.spare <= 0 && --open == 0) {
      return; // for the others nothing is left
    }
  }
}

} // namespace hvd_order::simulate
