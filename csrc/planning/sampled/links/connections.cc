#include "planning/sampled/links/connections.h"

#include <algorithm>

namespace hvd_order::simulate {

Connections::Connections(
    std::uint32_t workers,
    std::uint32_t servers,
    double workerBytesPerS,
    double serverBytesPerS,
    const Transmission& transmission,
    const Clock& clock,
    std::uint32_t others)
    : transmission_(transmission),
      servers_(servers),
      clock_(clock),
      links_(workers, servers, workerBytesPerS, serverBytesPerS, transmission.sharing, others),
      ends_(workers + others, servers, clock),
      connections_(std::size_t{workers + others} * servers),
      loads_(servers) {
  for (std::uint32_t number = 0; number < connections_.size(); ++number) {
    connections_[number].route = {number / servers, number % servers, number};
  }
}

void Connections::enqueue(const Transfer& transfer) {
  const std::uint32_t number = transfer.worker * servers_ + transfer.server;
  SimulatedConnection& connection = connections_[number];
  Transfer mine = transfer;
  mine.came = came_++;
  if (transmission_.turns == Turns::kPriority) {
    connection.waiting.pushUrgent(mine);
  } else {
    connection.waiting.push(mine);
  }
  if (!connection.active) {
    activate(connection);
    toBegin_.push_back(number);
  }
}

const Transfer* Connections::endTurn() {
  const std::uint32_t number = ends_.end();
  toBegin_.push_back(number);
  SimulatedConnection& connection = connections_[number];
  Transfer& transfer = connection.current;
  transfer.leftBytes -= connection.turnBytes;
  if (transfer.leftBytes <= 0) {
    return &transfer;
  }
  transfer.came = came_++;
  connection.waiting.push(transfer);
  return nullptr;
}

void Connections::beginTurns() {
  for (const std::uint32_t number : toBegin_) {
    SimulatedConnection& connection = connections_[number];
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
  ends_.findEarliest();
}

void Connections::beginTurn(SimulatedConnection& connection) {
  connection.current = transmission_.turns == Turns::kPriority ? connection.waiting.popUrgent()
                                                               : connection.waiting.pop();
  const double nowS = clock_.nowS();
  if (connection.firstS < 0) {
    connection.firstS = nowS;
  }
  if (connection.current.startS < 0) {
    connection.current.startS = nowS;
  }
  connection.turnBytes = connection.current.leftBytes;
  if (transmission_.turns == Turns::kWindow) {
    const bool cold = nowS < connection.firstS + transmission_.coldS;
    connection.turnBytes = std::min(
        connection.turnBytes, cold ? transmission_.coldWindowBytes : transmission_.windowBytes);
  }
  links_.turnTo(connection.route, connection.current.came);
  ends_.begin(connection.route, connection.turnBytes);
}

void Connections::activate(SimulatedConnection& connection) {
  connection.active = true;
  links_.activate(connection.route);
  Load& load = loads_[connection.route.server];
  if (load.active++ == 0) {
    load.sinceS = clock_.nowS();
  }
}

void Connections::deactivate(SimulatedConnection& connection) {
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
