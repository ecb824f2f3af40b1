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
      connections_(std::size_t{workers} * servers),
      ends_(connections_.size()),
      loads_(servers) {}

void Connections::enqueue(Transfer transfer) {
  const std::uint32_t number = transfer.worker * servers_ + transfer.server;
  Connection& connection = connections_[number];
  transfer.came = came_++;
  connection.waiting.push_back(transfer);
  if (transmission_.turns == Turns::kPriority) {
    std::push_heap(connection.waiting.begin(), connection.waiting.end(), kLessUrgent);
  }
  if (!connection.active) {
    activate(number);
    toBegin_.push_back(number);
  }
}

std::optional<Transfer> Connections::endTurn() {
  const std::uint32_t number = ends_.earliest();
  Connection& connection = connections_[number];
  ends_.set(number, NextEnd::kNever);
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
    if (connections_[number].waiting.empty()) {
      deactivate(number);
    } else {
      beginTurn(number);
    }
  }
  toBegin_.clear();
  if (!std::exchange(changed_, false)) {
    return;
  }
  links_.share(active_);
  const double nowS = clock_.nowS();
  for (std::size_t i = 0; i < active_.size(); ++i) {
    Connection& connection = connections_[activeNumber_[i]];
    if (connection.rate == active_[i].rate) {
      continue;
    }
    connection.leftOfTurn =
        std::max(connection.leftOfTurn - connection.rate * (nowS - connection.lastS), 0.0);
    connection.lastS = nowS;
    connection.rate = active_[i].rate;
    setEnd(activeNumber_[i]);
  }
}

void Connections::beginTurn(std::uint32_t number) {
  Connection& connection = connections_[number];
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
  connection.leftOfTurn = connection.turnBytes;
  connection.lastS = nowS;
  active_[connection.place].came = connection.current->came;
  if (transmission_.sharing == Sharing::kFifo) {
    changed_ = true; // the turn may have to wait for another connection's
    connection.rate = 0;
  }
  setEnd(number);
}

void Connections::setEnd(std::uint32_t number) {
  const Connection& connection = connections_[number];
  const bool moves = connection.rate > 0;
  ends_.set(
      number, moves ? connection.lastS + connection.leftOfTurn / connection.rate : NextEnd::kNever);
}

void Connections::activate(std::uint32_t number) {
  Connection& connection = connections_[number];
  connection.place = static_cast<std::uint32_t>(active_.size());
  connection.rate = 0;
  connection.active = true;
  active_.push_back({number / servers_, number % servers_, 0, 0});
  activeNumber_.push_back(number);
  changed_ = true;
  Load& load = loads_[number % servers_];
  if (load.active++ == 0) {
    load.sinceS = clock_.nowS();
  }
}

void Connections::deactivate(std::uint32_t number) {
  const std::uint32_t place = connections_[number].place;
  connections_[number].active = false;
  active_[place] = active_.back();
  activeNumber_[place] = activeNumber_.back();
  connections_[activeNumber_[place]].place = place;
  active_.pop_back();
  activeNumber_.pop_back();
  changed_ = true;
  Load& load = loads_[number % servers_];
  if (--load.active == 0) {
    load.busyS += clock_.nowS() - load.sinceS;
  }
}

double Connections::busyS(std::uint32_t server) const {
  const Load& load = loads_[server];
  return load.busyS + (load.active > 0 ? clock_.nowS() - load.sinceS : 0.0);
}

} // namespace hvd_order::simulate
