#include "planning/sampled/links/turn_ends.h"

#include <algorithm>

namespace hvd_order::simulate {

TurnEnds::TurnEnds(std::uint32_t workers, std::uint32_t servers, const Clock& clock)
    : clock_(clock),
      count_(servers),
      servers_(servers, Server{.turns = NextEnd(workers)}),
      accounts_(std::size_t{workers} * servers),
      own_(accounts_.size()),
      ends_(servers) {}

void TurnEnds::begin(const Route& route, double bytes) {
  Account& account = accounts_[route.number];
  if (account.rate > 0) {
    account.left = bytes;
    account.lastS = clock_.nowS();
    own_.set(route.number, account.lastS + bytes / account.rate);
    return;
  }
  Server& server = touch(route.server);
  server.turns.set(route.worker, server.sent + bytes);
}

void TurnEnds::stop(const Route& route) {
  if (accounts_[route.number].rate > 0) {
    accounts_[route.number].rate = 0;
  } else {
    touch(route.server).turns.set(route.worker, NextEnd::kNever);
  }
}

std::uint32_t TurnEnds::end() {
  const double nowS = clock_.nowS();
  if (own_.earliestAt() < ends_.earliestAt()) {
    const std::uint32_t connection = own_.earliest();
    own_.set(connection, NextEnd::kNever);
    nextS_ = std::min(ends_.earliestAt(), own_.earliestAt());
    return connection;
  }
  const std::uint32_t number = ends_.earliest();
  Server& server = servers_[number];
  const std::uint32_t worker = server.turns.earliest();
  // Exactly the turn's end, so that turns that end together still do.
  server.sent = server.turns.earliestAt();
  server.lastS = nowS;
  // As a rule no other turn ends now. Then this one is not removed: the connection's next turn, or
  // its stop, takes the place.
  const bool together = server.turns.secondAt() <= server.sent;
  if (!together && std::min(ends_.secondAt(), own_.earliestAt()) > nowS) {
    nextS_ = NextEnd::kNever;
  } else {
    server.turns.set(worker, NextEnd::kNever);
    ends_.set(number, together ? nowS : NextEnd::kNever);
    nextS_ = std::min(ends_.earliestAt(), own_.earliestAt());
  }
  return worker * count_ + number;
}

void TurnEnds::setRates(const SharedLinks& links) {
  for (const std::uint32_t number : links.changed()) {
    touch(number).rate = links.rateOf(number);
  }
  if (links.exceptions().empty() && exceptions_.empty()) {
    return;
  }
  ++lists_;
  for (const SharedLinks::Exception& each : links.exceptions()) {
    accounts_[each.route.number].seen = lists_;
    if (accounts_[each.route.number].rate != each.rate) {
      leave(each.route, each.rate);
    }
  }
  for (const Route& route : exceptions_) {
    if (accounts_[route.number].rate > 0 && accounts_[route.number].seen != lists_) {
      join(route);
    }
  }
  exceptions_.clear();
  for (const SharedLinks::Exception& each : links.exceptions()) {
    exceptions_.push_back(each.route);
  }
}

void TurnEnds::findEarliest() {
  for (const std::uint32_t number : touched_) {
    Server& server = servers_[number];
    server.isTouched = false;
    const double left = std::max(server.turns.earliestAt() - server.sent, 0.0);
    ends_.set(number, server.rate > 0 ? server.lastS + left / server.rate : NextEnd::kNever);
  }
  touched_.clear();
  nextS_ = std::min(ends_.earliestAt(), own_.earliestAt());
}

/// Brings a server's virtual time up to date, and has its next end computed.
TurnEnds::Server& TurnEnds::touch(std::uint32_t server) {
  Server& touched = servers_[server];
  if (!touched.isTouched) {
    touched.isTouched = true;
    touched_.push_back(server);
  }
  touched.sent += touched.rate * (clock_.nowS() - touched.lastS);
  touched.lastS = clock_.nowS();
  return touched;
}

/// The connection gets a rate of its own, or another one.
void TurnEnds::leave(const Route& route, double rate) {
  Account& account = accounts_[route.number];
  const double nowS = clock_.nowS();
  if (account.rate > 0) {
    account.left = std::max(account.left - account.rate * (nowS - account.lastS), 0.0);
  } else {
    Server& server = touch(route.server);
    account.left = std::max(server.turns.of(route.worker) - server.sent, 0.0);
    server.turns.set(route.worker, NextEnd::kNever);
  }
  account.rate = rate;
  account.lastS = nowS;
  own_.set(route.number, nowS + account.left / rate);
}

/// The connection goes on with the server's rate.
void TurnEnds::join(const Route& route) {
  Account& account = accounts_[route.number];
  own_.set(route.number, NextEnd::kNever);
  const double sent = account.rate * (clock_.nowS() - account.lastS);
  account.rate = 0;
  begin(route, std::max(account.left - sent, 0.0));
}

} // namespace hvd_order::simulate
