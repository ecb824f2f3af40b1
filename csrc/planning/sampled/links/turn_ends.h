#pragma once

#include <cstdint>
#include <vector>

#include "planning/clock.h"
#include "planning/sampled/links/next_end.h"
#include "planning/sampled/links/shared_links.h"

namespace hvd_order::simulate {

/// When the turns of all connections of one direction end, while their rates change.
///
/// Connections that a server's link holds back have one rate, so the server keeps a virtual time
/// for them: the bytes that each of them has been sent. A turn ends at a virtual time that is known
/// when it begins, and a change of the rate moves no turn. Only a connection with a rate of its own
/// (an exception of SharedLinks) keeps its own account, and leaves and joins the virtual time with
/// the bytes that its turn has left.
///
/// Source: virtual time of egalitarian processor sharing, as in weighted fair queueing (Parekh,
/// Gallager, IEEE/ACM Transactions on Networking 1, 1993).
class TurnEnds final {
 public:
  TurnEnds(std::uint32_t workers, std::uint32_t servers, const Clock& clock);

  /// A turn of so many bytes begins now; the connection has no other.
  void begin(const Route& route, double bytes);
  /// The connection has become idle.
  void stop(const Route& route);
  /// Takes over rates that have changed now.
  void setRates(const SharedLinks& links);
  /// To be called after the calls above, before time goes on.
  void findEarliest();
  /// Time at which the next turn ends; infinity if none moves. Before `findEarliest`, only turns
  /// that end now are regarded.
  [[nodiscard]] double earliestS() const {
    return nextS_;
  }
  /// Ends that turn, at its time. Before `findEarliest`, its connection must begin another one or
  /// stop.
  /// @return its connection; of simultaneous ones first those with a server's rate, by server and
  ///   worker, then the others by number.
  std::uint32_t end();

 private:
  struct Server {
    NextEnd turns;   // by worker, in virtual time
    double sent = 0; // virtual time at `lastS`
    double rate = 0;
    double lastS = 0;
    bool isTouched = false;
  };
  struct Account {
    double rate = 0; // 0: that of the server
    double left = 0; // of the turn, at `lastS`
    double lastS = 0;
    std::uint64_t seen = 0; // the last list of exceptions with this connection
  };

  Server& touch(std::uint32_t server);
  void leave(const Route& route, double rate);
  void join(const Route& route);

  const Clock& clock_;
  const std::uint32_t count_; // of servers
  std::vector<Server> servers_;
  std::vector<std::uint32_t> touched_; // servers whose next end is out of date
  std::vector<Account> accounts_;      // by connection
  NextEnd own_;                        // turns of connections with a rate of their own
  NextEnd ends_;                       // the earliest turn of each server
  double nextS_ = NextEnd::kNever;
  std::vector<Route> exceptions_; // as `setRates` last found them
  std::uint64_t lists_ = 0;       // of exceptions, so far
};

} // namespace hvd_order::simulate
