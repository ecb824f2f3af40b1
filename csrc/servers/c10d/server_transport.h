#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "servers/c10d/model_pushes.h"
#include "servers/wire/connection.h"
#include "servers/wire/registration.h"
#include "servers/worker/server_connections.h"
#include "torch/c10d/torch_transport.h"

namespace hvd_order {

/// Carries slices to parameter servers and their answers back: the sum over the workers, or the
/// updated parameters.
///
/// Asynchronous workers push in orders of their own. A map, the same on all workers, assigns slices
/// to servers; it changes when servers join, leave or slow down (server_core.h describes how slices
/// move).
/// When a server is lost, pushes under way to it are sent again to the next owner.
///
/// Thread safety: same as TorchTransport.
class ServerTransport final : public TorchTransport,
                              public std::enable_shared_from_this<ServerTransport> {
 public:
  using Figures = ServerConnections::Figures;
  struct Updates {
    std::uint64_t slices = 0;
    ByteCount bytes = 0;
  };
  /// Number of elements of a tensor that are a parameter (the rest is padding), and the number of
  /// its rules.
  struct ServedParameter {
    std::uint32_t elements;
    std::uint32_t group;
  };
  /// Called when a server is gone, or has sent a control text; on a connection's thread.
  using OnLost = std::function<void(ServerId server, const std::string& why)>;
  using OnControl = std::function<void(ServerId server, const std::string& text)>;

  ServerTransport(const PushSettings& settings, OnLost onLost, OnControl onControl);
  ~ServerTransport() override;

  /// Adds a connection and describes all models to the server. @throws InvalidUsage if the server
  /// already has a connection.
  void connect(ServerId server, std::shared_ptr<Connection> connection);
  [[nodiscard]] std::vector<ServerId> servers() const;
  /// Counts these servers as lost, all at once; worker 0 informs the other workers. Closes their
  /// connections, so that no frame is accepted from a server that is still running. Ignores
  /// servers that are not connected.
  void giveUp(const std::vector<ServerId>& servers, const std::string& why);
  /// Number of frames received from each server.
  [[nodiscard]] std::map<ServerId, std::uint64_t> framesFrom() const;
  /// Whether an answer of any server is awaited.
  [[nodiscard]] bool waits() const;
  void sendControl(ServerId server, const std::string& text);

  /// Prepares the next `setBuffers` of the model. Without parameters, servers only sum.
  /// @param places of all slices; the same on every worker.
  /// @param parameters by TensorId, where servers update; else empty.
  void
  prepare(ModelId model, std::vector<SliceOwners> places, std::vector<ServedParameter> parameters);
  /// Collective: every worker calls it in the same order.
  /// @throws InvalidUsage without `prepare`, or if the places do not fit the slices.
  void setBuffers(ModelId model, const std::vector<at::Tensor>& buffers, const SliceLayout& layout)
      override;
  void removeBuffers(ModelId model) override;

  /// Worker 0: sends one part of the initial state from the buffers: first the parameters (1),
  /// then each of the optimizer's moments (2 and up). `parts` is the number of parts including the
  /// counters, part 0, which are sent along automatically.
  void beginWithBuffers(
      ModelId model,
      std::uint32_t part,
      std::uint32_t parts,
      std::uint64_t stepsBefore);
  /// Worker 0: sets the rules for all later pushes.
  void setRules(ModelId model, const std::vector<UpdateRule>& rules);
  /// Worker 0: sets the map from now on; the other workers receive it from the servers. Does
  /// nothing if the model is gone.
  void setMap(ModelId model, std::vector<SliceOwners> places);
  [[nodiscard]] std::vector<SliceOwners> places(ModelId model) const;

  /// Fills the idle buffers from the servers: with the parameters or sums (part 1), or one of the
  /// optimizer's moments (2 and up). The first slice has the highest urgency. Blocks. If a server
  /// is lost meanwhile, its replica answers as soon as a map names it.
  /// @return the slices in the order in which they came.
  /// @throws TransferTimeout, or PeerLost: late answers may still write to the buffers, so the
  ///   model cannot be pulled again. @throws InvalidUsage if that is tried, or if another thread
  ///   pulls this model.
  std::vector<SliceIndex> pull(ModelId model, std::uint32_t part, std::chrono::nanoseconds timeout);

  /// Number of updates that the last answer about the model included, with those before its
  /// registration.
  [[nodiscard]] std::uint64_t steps(ModelId model) const;

  std::vector<Figures> takeFigures();
  /// Updates that would have been too late and were not sent.
  [[nodiscard]] Updates dropped() const;
  /// Updates that were sent to a helper, to be added to those of other workers.
  [[nodiscard]] Updates aggregated() const;

  void issue(SliceKey key, const Slice& slice, Done done) override;
  void inquire() override;
  [[nodiscard]] std::string report() const override;
  void abort() noexcept override;
  /// Tells all servers that this worker leaves, and ends the connections. Slices under way fail.
  void close() noexcept;

 private:
  struct Prepared {
    std::vector<SliceOwners> places;
    std::vector<ServedParameter> parameters; // by TensorId
  };
  /// A tensor of no model that a server sums.
  struct NamedSum {
    at::Tensor tensor;
    Done done;
    ServerId server;
  };

  void begin(Sum sum) override;
  void onFrame(ServerId server, const FrameHeader& header, const Payload& payload);
  void answered(ServerId server, const FrameHeader& header, const Payload& payload);
  void admitted(ServerId server, const FrameHeader& header);
  void mapCame(ServerId server, const FrameHeader& header, const Payload& payload);
  void lateCame(ServerId server, const Payload& payload);
  void lost(ServerId server, const std::string& why);
  void fail(const std::exception_ptr& error);
  // Under the lock:
  std::optional<ModelPushes::Expected>
  take(ServerId server, const FrameHeader& header, const Payload& payload);
  [[nodiscard]] ModelPushes* find(const FrameHeader& header);
  [[nodiscard]] std::exception_ptr errorOfLoss() const;
  [[nodiscard]] std::vector<Done> takeSumsOf(ServerId server);

  const PushSettings settings_;
  const OnLost onLost_;
  const OnControl onControl_;

  mutable std::mutex mutex_; // guards what follows; only connections' send is called under it
  std::condition_variable changed_;
  ServerConnections connections_;
  std::map<ModelId, ModelPushes> models_;
  std::map<ModelId, Prepared> prepared_;
  std::map<std::uint64_t, NamedSum> sums_; // by name hash
  std::uint64_t sumsBegun_ = 0;            // number of such sums so far
  std::uint32_t layouts_ = 0;
  std::exception_ptr error_;
  Updates dropped_;
  Updates aggregated_;
  std::set<ServerId> silent_; // servers that have not answered the last inquiry
  std::set<Rank> late_;       // ranks that servers wait for, from their answers
};

} // namespace hvd_order
