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
#include "server/admission/aggregator.h"
#include "server/slice/served_model.h"
#include "server/slice/tensor_sums.h"

namespace hvd_order {

/// A parameter server: frames come in through connections, are worked on, and answers go out.
///
/// It has no threads and waits for nothing: all work is done on the threads of the connections, so
/// what different workers push is summed at once. A slice has a lock of its own.
///
/// Slices move between servers without a pause. A new map says who holds what; each worker switches
/// when it gets it, tells every server so, and sends what comes then to the new owner. When the old
/// owner has heard that of all workers, no push for it is under way any more, so it hands the state
/// over, and with it the pushes of rounds that it could not finish. The new owner keeps what it
/// gets until then. What a server gets of others that by its map is another's, it passes on.
/// served_slice.h says how slices survive the loss of a server.
///
/// Thread safety: all methods may be called from any thread.
class ServerCore final : public std::enable_shared_from_this<ServerCore> {
 public:
  explicit ServerCore(ServerOptions options);
  ServerCore(const ServerCore&) = delete;
  ServerCore& operator=(const ServerCore&) = delete;
  ~ServerCore();

  /// Takes up a connection and starts it. @throws InvalidUsage if that peer has one already.
  void connect(Peer peer, const std::shared_ptr<Connection>& connection);
  /// Sends a control text. Dropped if the peer is gone.
  void sendControl(Peer peer, const std::string& text);
  [[nodiscard]] std::vector<Peer> peers() const {
    return room_.peers.all();
  }

  /// For tests of the frames' parser: as if the frame had come over the connection of `from`.
  void onFrame(Peer from, const FrameHeader& header, Payload payload);

  /// Slices held: by (model, layout, slice) the version and a checksum of the value.
  struct Held {
    ModelId model;
    std::uint32_t layout;
    SliceIndex slice;
    bool owned; ///< else it is a copy for the case that its owner is lost
    Round version;
    std::uint32_t checksum; ///< CRC-32C of the value
  };
  [[nodiscard]] std::vector<Held> audit() const;
  /// Which workers the slices that wait for somebody wait for; empty if none waits.
  [[nodiscard]] std::set<int> lateWorkers() const;

  /// Whether a worker is lost or has given up, so that none can go on.
  [[nodiscard]] bool hasFailed() const {
    return hasFailed_;
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
  void tellWhoIsLate(Peer to);
  void lost(Peer peer, const std::string& why);
  void left(Peer from, const Payload& payload);
  void tellWorkers(const std::string& text);
  void giveUp(Peer from, const FrameHeader& header, const Payload& payload);

  [[nodiscard]] std::vector<std::shared_ptr<ServedModel>> allModels() const;
  [[nodiscard]] std::shared_ptr<ServedModel> modelOf(const FrameHeader& header) const;
  [[nodiscard]] int workerOf(Peer from, const FrameHeader& header) const;

  struct Early {
    Peer from;
    FrameHeader header;
    Payload payload;
  };

  ServerRoom room_; // before the models, which use it
  std::atomic<bool> hasFailed_ = false;
  std::atomic<bool> retired_ = false; // the others have given it up: it does nothing more

  mutable std::shared_mutex modelsMutex_; // guards which models there are
  std::vector<Early> early_;              // about models to come
  std::map<ModelKey, std::shared_ptr<ServedModel>> models_;
  std::map<ModelKey, std::set<int>> registered_; // by which workers

  TensorSums sums_;
  Aggregator aggregator_;
};

} // namespace hvd_order
