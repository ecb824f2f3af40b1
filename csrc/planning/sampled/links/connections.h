#pragma once

#include <cstdint>
#include <vector>

#include "planning/clock.h"
#include "planning/sampled/links/shared_links.h"
#include "planning/sampled/links/transfer_queue.h"
#include "planning/sampled/links/turn_ends.h"

namespace hvd_order::simulate {

/// How a connection takes turns among the transfers that wait.
enum class Turns : std::uint8_t {
  kWhole,    ///< one transfer after the other, as they came (FIFO)
  kWindow,   ///< in turns of one window each, as HTTP/2 does with its streams
  kPriority, ///< the most urgent one as a whole, then the next (an enforced order)
};

/// How tensors get from one process to another. One direction.
///
/// A window is what a stream of HTTP/2 may send before its receiver answers. gRPC begins with
/// 65,535 bytes and allows 4 MiB once its first probe is back (grpc, chttp2 flow_control.cc).
struct Transmission {
  Turns turns = Turns::kWhole;
  double windowBytes = 4 << 20;
  double coldWindowBytes = 65535;
  double coldS = 0; ///< time from a connection's first byte in which `coldWindowBytes` holds
  Sharing sharing = Sharing::kFair;
  double latencyS = 0;
  // Work of a connection's end for a transfer, one after the other, before and behind its bytes.
  double sendSecondsPerByte = 0;
  double sendSeconds = 0;
  double receiveSecondsPerByte = 0;
  double receiveSeconds = 0;
};

/// The connections of one direction between all workers and all servers. What goes from one server
/// to another uses the links of both, each in the connections of its direction, and counts as from
/// or to one of the `others`, which are no bottleneck themselves.
///
/// A connection sends one turn after the other; while it has something to send, it is active. What
/// comes at one moment comes together: turns begin in `beginTurns`, before time goes on. Rates
/// change only when a connection becomes active or idle (with Sharing::kFifo also with each turn),
/// and are computed there, once for all changes.
class Connections final {
 public:
  Connections(
      std::uint32_t workers,
      std::uint32_t servers,
      double workerBytesPerS,
      double serverBytesPerS,
      const Transmission& transmission,
      const Clock& clock,
      std::uint32_t others = 0);

  /// @param transfer its `worker` may be the number of workers plus that of another server.
  void enqueue(const Transfer& transfer);
  /// Time at which the next turn ends; infinity if none is under way.
  [[nodiscard]] double nextEndS() const {
    return ends_.earliestS();
  }
  /// Ends that turn, at its time.
  /// @return the transfer that ended with it, until `beginTurns`; null if it goes on.
  const Transfer* endTurn();
  /// Whether `beginTurns` must be called before time goes on.
  [[nodiscard]] bool hasTurnsToBegin() const {
    return !toBegin_.empty();
  }
  void beginTurns();
  /// Time for which the server's link has carried something.
  [[nodiscard]] double busyS(std::uint32_t server) const;

 private:
  struct SimulatedConnection {
    Route route;
    TransferQueue waiting;
    Transfer current{};
    double turnBytes = 0;
    double firstS = -1; // of its first byte
    bool active = false;
  };
  struct Load {
    std::uint32_t active = 0;
    double sinceS = 0;
    double busyS = 0;
  };

  void beginTurn(SimulatedConnection& connection);
  void activate(SimulatedConnection& connection);
  void deactivate(SimulatedConnection& connection);

  const Transmission transmission_;
  const std::uint32_t servers_;
  const Clock& clock_;
  SharedLinks links_;
  TurnEnds ends_;
  std::vector<SimulatedConnection> connections_; // by worker and server
  std::uint64_t came_ = 0;
  std::vector<std::uint32_t> toBegin_; // connections whose next turn must begin
  std::vector<Load> loads_;            // by server
};

} // namespace hvd_order::simulate
