#include "simulate/sampled/connections.h"

#include <algorithm>
#include <utility>

namespace hvd_order::simulate {

namespace {

constexpr auto kLessUrgent = [](const Transfer& a, const Transfer& b) {
  return a.priority != b.priority ? a.priority > b.priority : a.came > b.came;
};

} // namespace

Connections::Connections(
    std::uint32_t workers,
    std::uint32_t servers,
    double workerBytesPerS,
    double serverBytesPerS,
    const Transmission& transmission,
    const Clock& clock)
    : transmission_(transmission),
      servers_(servers),
      clock_(clock),
      links_(workers, servers, workerBytesPerS, serverBytesPerS, transmission.sharing),
      ends_(workers, servers, clock),
      connections_(std::size_t{workers} * servers),
      loads_(servers) {
  for (std::uint32_t number = 0; number < connections_.size(); ++number) {
    connections_[number].route = {number / servers, number % servers, number};
  }
}

void Connections::enqueue(Transfer transfer) {
  const std::uint32_t number = transfer.worker * servers_ + transfer.server;
  Connection& connection = connections_[number];
  transfer.came = came_++;
  connection.waiting.push_back(transfer);
  if (transmission_.turns == Turns::kPriority) {
    std::push_heap(connection.waiting.begin(), connection.waiting.end(), kLessUrgent);
  }
  if (!connection.active) {
    activate(connection);
    toBegin_.push_back(number);
  }
}

std::optional<Transfer> Connections::endTurn() {
  const std::uint32_t number = ends_.end();
  Connection& connection = connections_[number];
  toBegin_.push_back(number);
  Transfer transfer = *std::exchange(connection.current, std::nullopt);
  transfer.leftBytes -= connection.turnBytes;
  if (transfer.leftBytes <= 0) {
    return transfer;
  }
  transfer.came = came_++;
  connection.waiting.push_back(transfer);
  return std::nullopt;
}

void Connections::settle() {
  for (const std::uint32_t number : toBegin_) {
    Connection& connection = connections_[number];
    if (connection.waiting.empty()) {
      deactivate(connection);
    } else {
      beginTurn(connection);
    }
  }
  toBegin_.clear();
  if (links_.share()) {
    ends_.setRates(links_);
  }
  ends_.settle();
}

void Connections::beginTurn(Connection& connection) {
  if (transmission_.turns == Turns::kPriority) {
    std::pop_heap(connection.waiting.begin(), connection.waiting.end(), kLessUrgent);
    connection.current = connection.waiting.back();
    connection.waiting.pop_back();
  } else {
    connection.current = connection.waiting.front();
    connection.waiting.pop_front();
  }
  const double nowS = clock_.nowS();
  if (connection.firstS < 0) {
    connection.firstS = nowS;
  }
  connection.turnBytes = connection.current->leftBytes;
  if (transmission_.turns == Turns::kWindow) {
    const bool cold = nowS < connection.firstS + transmission_.coldS;
    connection.turnBytes = std::min(
        connection.turnBytes, cold ? transmission_.coldWindowBytes : transmission_.windowBytes);
  }
  links_.turnTo(connection.route, connection.current->came);
  ends_.begin(connection.route, connection.turnBytes);
}

void Connections::activate(Connection& connection) {
  connection.active = true;
  links_.activate(connection.route);
  Load& load = loads_[connection.route.server];
  if (load.active++ == 0) {
    load.sinceS = clock_.nowS();
  }
}

void Connections::deactivate(Connection& connection) {
  connection.active = false;
  links_.deactivate(connection.route);
  ends_.stop(connection.route);
  Load& load = loads_[connection.route.server];
  if (--load.active == 0) {
    load.busyS += clock_.nowS() - load.sinceS;
  }
}

double Connections::busyS(std::uint32_t server) const {
  const Load& load = loads_[server];
  return load.busyS + (load.active > 0 ? clock_.nowS() - load.sinceS : 0.0);
}

} // namespace hvd_order::simulate
