#pragma once

#include <cstdint>
#include <vector>

namespace hvd_order::simulate {

/// How the connections of a link share it.
enum class Sharing : std::uint8_t {
  kFair, ///< max-min: a connection is only slower than another where a link of its own is full
  kFifo, ///< the transfer that came first takes all that it can
};

/// Rates of the connections of one direction: each leads over the link of a worker and the link of
/// a server.
///
/// Flows (simulate/network) keeps the work of each flow and advances all of them at every event.
/// Here a connection carries one transfer after the other, its rate changes rarely, and only the
/// rates are kept: 64 workers and 4 servers have 256 connections and a million transfers.
///
/// Source: Bertsekas and Gallager, Data Networks, section 6.5.2 (progressive filling).
class SharedLinks final {
 public:
  SharedLinks(
      std::size_t workers,
      std::size_t servers,
      double workerBytesPerS,
      double serverBytesPerS,
      Sharing sharing);

  /// A connection that has something to send.
  struct Active {
    std::uint32_t worker;
    std::uint32_t server;
    std::uint64_t came; ///< number of the transfer that it sends, in the order in which they came
    double rate;        ///< bytes/s; set by `share`
  };

  /// Sets the rate of each connection.
  void share(std::vector<Active>& active);

 private:
  struct Link {
    double spare;
    std::uint32_t toGo; // connections without a rate so far
    bool full;
  };

  void shareFairly(std::vector<Active>& active);
  void shareInOrder(std::vector<Active>& active);

  double workerBytesPerS_;
  double serverBytesPerS_;
  Sharing sharing_;
  std::vector<Link> workers_; // scratch of share()
  std::vector<Link> servers_;
  std::vector<std::uint32_t> order_;
};

} // namespace hvd_order::simulate
