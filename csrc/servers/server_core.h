#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/types.h"
#include "servers/admission/aggregator.h"
#include "servers/slice/served_model.h"
#include "servers/slice/tensor_sums.h"

namespace hvd_order {

/// A parameter server: receives frames through connections, processes them and sends answers.
///
/// The class has no threads of its own and never waits: all work runs on the threads of the
/// connections, so pushes of different workers are summed at the same time. Each slice has its own
/// lock.
///
/// Slices move between servers without a pause. A new map states which server holds each slice.
/// Each worker switches when it receives the map, tells every server so, and sends later pushes to
/// the new owner. When all workers have told the old owner, no push for the slice is on its way to
/// the old owner any more. The old owner then sends the state to the new owner, with the pushes of
/// rounds that it could not finish. The new owner keeps the pushes that it receives until the
/// state arrives. A server passes a frame on if, by its map, another server owns the slice.
/// served_slice.h describes how slices survive the loss of a server.
///
/// Thread safety: all methods may be called from any thread.
class ServerCore final : public std::enable_shared_from_this<ServerCore> {
 public:
  explicit ServerCore(ServerOptions options);
  ServerCore(const ServerCore&) = delete;
  ServerCore& operator=(const ServerCore&) = delete;
  ~ServerCore();

  /// Adds a connection and starts it. @throws InvalidUsage if the peer already has one.
  void connect(Peer peer, const std::shared_ptr<Connection>& connection);
  /// Sends a control text; drops it if the peer is gone.
  void sendControl(Peer peer, const std::string& text);
  [[nodiscard]] std::vector<Peer> peers() const {
    return room_.peers.all();
  }

  /// For tests of the frame parser: handles the frame as if it had come over the connection of
  /// `from`.
  void onFrame(Peer from, const FrameHeader& header, Payload payload);

  /// A slice of which this server has the state, with the version and a checksum of its value.
  struct AuditedSlice {
    ModelId model;
    std::uint32_t layout;
    SliceIndex slice;
    bool owned; ///< else a copy, for the case that the owner is lost
    Round version;
    std::uint32_t checksum; ///< CRC-32C of the value
  };
  [[nodiscard]] std::vector<AuditedSlice> audit() const;
  /// Workers whose push is missing while a slice waits for it; empty if no slice waits.
  [[nodiscard]] std::set<int> lateWorkers() const;

  /// Whether a worker is lost or has given up, so that no worker can continue.
  [[nodiscard]] bool hasFailed() const {
    return hasFailed_;
  }

  /// Times of updates; may be turned on at any time.
  [[nodiscard]] Recording<UpdateTimes>& updates() {
    return room_.updates;
  }

  /// Ends all connections.
  void stop() noexcept;

 private:
  using ModelKey = std::pair<ModelId, std::uint32_t>; // with its layout

  void handle(Peer from, const FrameHeader& header, Payload payload);
  void handleOfModel(Peer from, const FrameHeader& header, Payload payload);
  void handleOfGroup(Peer from, const FrameHeader& header, Payload payload);
  bool isEarly(Peer from, const FrameHeader& header, const Payload& payload);
  void takeEarly();
  void registerModel(Peer from, const FrameHeader& header, const Payload& payload);
  void sumTensor(Peer from, const FrameHeader& header, Payload payload);
  void sendLateWorkers(Peer to);
  void lost(Peer peer, const std::string& why);
  void left(Peer from, const Payload& payload);
  void failWorkers(const std::string& text);
  void giveUp(Peer from, const FrameHeader& header, const Payload& payload);

  [[nodiscard]] std::vector<std::shared_ptr<ServedModel>> allModels() const;
  [[nodiscard]] std::shared_ptr<ServedModel> modelOf(const FrameHeader& header) const;
  [[nodiscard]] int workerOf(Peer from, const FrameHeader& header) const;

  struct EarlyFrame {
    Peer from;
    FrameHeader header;
    Payload payload;
  };

  ServerRoom room_; // declared before the models, which use it
  std::atomic<bool> hasFailed_ = false;
  std::atomic<bool> retired_ = false; // given up by the others: it does no more work

  mutable std::shared_mutex modelsMutex_; // guards `earlyFrames_`, `models_` and `registered_`
  std::vector<EarlyFrame> earlyFrames_;   // frames about models that are not registered yet
  std::map<ModelKey, std::shared_ptr<ServedModel>> models_;
  std::map<ModelKey, std::set<int>> registered_; // workers that have registered the model

  TensorSums sums_;
  Aggregator aggregator_;
};

} // namespace hvd_order
