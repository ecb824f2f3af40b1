#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd_order::simulate {

/// How the connections of a link share it.
enum class Sharing : std::uint8_t {
  kFair, ///< max-min: a connection is only slower than another where a link of its own is full
  kFifo, ///< the transfer that came first takes all that it can
};

/// A connection of one direction, over the link of a worker and the link of a server.
struct Route {
  std::uint32_t worker;
  std::uint32_t server;
  std::uint32_t number; ///< of the connection: worker * servers + server
};

/// Rates of the connections of one direction.
///
/// Fair shares are found by progressive filling: the link that gives each of its connections the
/// least fixes their rates, then the others share what is left in the same way. Here the servers,
/// which are few, are fixed as a whole, the one with the least share first, as long as no worker's
/// link can be full earlier: what a worker that uses all servers had left, divided by the number of
/// servers that are not fixed, is at least this server's share. So far no connection is looked at.
/// The connections of the servers that remain, which have few connections each, are then filled one
/// by one. The test follows from the rule; the rule is in Bertsekas and Gallager, Data Networks,
/// section 6.5.2.
///
/// All connections that a server's link holds back have one rate, so a rate is kept for each server
/// and for each connection that differs: with kFair those that a worker's link holds back, with
/// kFifo those that move at all.
class SharedLinks final {
 public:
  /// @param others further ends, numbered behind the workers, whose links are as fast as the
  ///   fastest.
  SharedLinks(
      std::uint32_t workers,
      std::uint32_t servers,
      double workerBytesPerS,
      double serverBytesPerS,
      Sharing sharing,
      std::uint32_t others = 0);

  /// A connection has something to send.
  void activate(const Route& route);
  /// A connection has nothing to send any more.
  void deactivate(const Route& route);
  /// An active connection turns to a transfer, or goes on with one.
  /// @param came number of the transfer, in the order in which they came.
  void turnTo(const Route& route, std::uint64_t came);

  /// Computes the rates.
  /// @return whether they may have changed.
  bool share();

  /// Servers whose rate the last `share` may have changed.
  [[nodiscard]] std::span<const std::uint32_t> changed() const {
    return changed_;
  }
  /// Rate, in bytes/s, of each active connection of a server that is not among `exceptions`.
  [[nodiscard]] double rateOf(std::uint32_t server) const {
    return rates_[server];
  }
  struct Exception {
    Route route;
    double rate;
  };
  [[nodiscard]] std::span<const Exception> exceptions() const {
    return exceptions_;
  }

 private:
  struct Link {
    double spare = 0;
    double share = 0;       // of what is spare, for each of toGo
    std::uint32_t toGo = 0; // connections without a rate so far
  };
  struct Turn {
    std::uint64_t came;
    Route route;
  };

  [[nodiscard]] double linkOf(std::uint32_t worker) const {
    return worker < workers_ ? workerBytesPerS_ : std::max(workerBytesPerS_, serverBytesPerS_);
  }
  void touch(std::uint32_t server);
  void shareFairly();
  void shareUnevenly();
  void collect(std::span<const std::uint32_t> fixed, std::span<const std::uint32_t> rest);
  void fill(std::span<const std::uint32_t> rest);
  void shareInOrder();
  void removeTurn(const Route& route);

  const std::uint32_t workers_; // without the others
  const double workerBytesPerS_;
  const double serverBytesPerS_;
  const Sharing sharing_;
  bool shared_ = true;                 // nothing has changed since `share`
  std::vector<std::uint32_t> touched_; // servers that have other connections since `share`
  std::vector<bool> isTouched_;        // by server
  std::vector<std::uint32_t> changed_;
  std::vector<double> evenly_; // by server: rate if its link holds back all of its connections
  std::vector<double> rates_;  // by server
  bool even_ = true;           // both are the same
  std::vector<Exception> exceptions_;
  std::vector<std::vector<Route>> active_; // by server: its connections that are active
  std::vector<std::uint32_t> places_;      // by connection: in active_
  std::vector<Turn> turns_;                // kFifo: of the active connections, in order
  std::vector<std::uint64_t> came_;        // kFifo, by connection: of its turn in turns_
  // Scratch of share().
  std::vector<std::uint32_t> byShare_;
  std::vector<Route> toGo_;        // connections without a rate so far
  std::vector<std::uint32_t> met_; // workers of toGo_
  std::vector<Link> workerLinks_;
  std::vector<Link> serverLinks_;
};

} // namespace hvd_order::simulate
