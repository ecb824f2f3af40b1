#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "servers/slice/slice_store.h"
#include "servers/wire/connection.h"
#include "servers/wire/registration.h"
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
  /// Work of a server since the last call of `takeFigures`, as this worker observed it.
  struct Figures {
    ServerId server;
    ByteCount bytes;    ///< of answers
    double busySeconds; ///< time with a push of this worker under way to it
  };
  struct Updates {
    std::uint64_t slices = 0;
    ByteCount bytes = 0;
  };
  /// Number of elements of a tensor that are a parameter (the rest is padding), and the number of
  /// its rules.
  struct Parameter {
    std::uint32_t elements;
    std::uint32_t group;
  };
  /// Called when a server is gone, or has sent a control text; on a connection's thread.
  using OnLost = std::function<void(ServerId server, const std::string& why)>;
  using OnControl = std::function<void(ServerId server, const std::string& text)>;

  /// @param ordered of the frames that wait for a line, the most urgent goes next; else the
  ///   oldest.
  /// @param asksFirst servers bound the delay of updates: each push waits until it is admitted.
  ServerTransport(
      Rank rank,
      int workers,
      bool ordered,
      bool asksFirst,
      OnLost onLost,
      OnControl onControl);
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
  void prepare(ModelId model, std::vector<Placement> places, std::vector<Parameter> parameters);
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
  void setMap(ModelId model, std::vector<Placement> places);
  [[nodiscard]] std::vector<Placement> places(ModelId model) const;

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
  struct UnderWay {
    Done done;
    Round round;
    ServerId server;
    bool isRepeated = false; // the gradient has been given to a connection before
  };
  struct Once {
    at::Tensor tensor;
    Done done;
    ServerId server;
  };
  struct Pull {
    std::uint32_t part;
    std::vector<bool> isTaken;       // by slice: its answer is in the buffer, or being written
    std::vector<SliceIndex> arrived; // in the order in which they came
    std::exception_ptr error;        // why the rest will not come
  };
  struct GivenRules {
    RulesNumber number;
    Round since;
    std::vector<std::byte> bytes;
  };
  struct Registered {
    std::uint32_t layout = 0;
    std::uint32_t map = 0;
    Registration registration;
    std::vector<Placement> places;
    std::vector<Placement> firstPlaces;
    bool hasLost = false; // pushes may be lost until a map names no lost server
    std::vector<at::Tensor> views;
    std::vector<std::string> names;                // of the slices
    std::vector<Round> rounds;                     // pushes so far, by slice
    std::vector<std::optional<UnderWay>> underWay; // by slice
    std::deque<GivenRules> rules;                  // worker 0 only
    RulesNumber rulesGiven = 0;
    std::uint64_t steps = 0;         // updates that the last answer included
    std::vector<std::uint64_t> read; // same as `steps`, for each slice
    std::shared_ptr<Pull> pull;      // the current one
    bool pulledInVain = false;       // answers to a pull that failed may still come
  };
  struct Line {
    std::shared_ptr<Connection> connection;
    std::uint64_t frames = 0; // number of frames received
    ByteCount bytes = 0;
    int underWay = 0;
    double busySeconds = 0;
    double busySince = 0;
  };

  // server_transport.cc:
  void lost(ServerId server, const std::string& why);
  void fail(const std::exception_ptr& error);
  // Under the lock:
  void tell(Line& line, ModelId model, const Registered& registered);
  static void say(Line& line, ModelId model, const Registered& registered, const GivenRules& rules);
  void adopt(ModelId model, std::uint32_t version, std::vector<Placement> places);
  void pushAgain(ModelId model, Registered& registered);
  void askAgain(ModelId model, const Registered& registered, SliceIndex slice);
  [[nodiscard]] std::vector<Done> takeOncesOf(ServerId server);
  Line& lineFor(ServerId server);
  [[nodiscard]] bool isLost(const Placement& place) const;
  [[nodiscard]] std::optional<Placement> lostForGood() const;
  [[nodiscard]] ServerLost lossOf(const Placement& place) const;
  void busy(Line& line);
  void idle(ServerId server);

  // server_pushes.cc, with `issue` and `pull`:
  void begin(Sum sum) override;
  void onFrame(ServerId server, const FrameHeader& header, const Payload& payload);
  void answered(ServerId server, const FrameHeader& header, const Payload& payload);
  void admitted(ServerId server, const FrameHeader& header);
  // Under the lock:
  void push(ModelId model, Registered& registered, SliceIndex slice);
  void request(ModelId model, Registered& registered, SliceIndex slice);
  static Payload gradientOf(const Registered& registered, UnderWay& underWay, SliceIndex slice);
  Registered* registeredFor(const FrameHeader& header);
  void finish(const FrameHeader& header, const Done& done, const std::exception_ptr& error);
  static void
  ask(Line& line, const Registered& registered, FrameHeader header, std::uint16_t flags);
  [[nodiscard]] std::uint64_t urgencyOf(SliceIndex slice) const;
  [[nodiscard]] bool asksFirst(const Registered& registered) const;

  const Rank rank_;
  const int workers_;
  const bool ordered_;
  const bool asksFirst_;
  const OnLost onLost_;
  const OnControl onControl_;

  mutable std::mutex mutex_; // guards what follows; only connections' send is called under it
  std::condition_variable changed_;
  std::map<ServerId, Line> lines_;
  std::map<ServerId, std::string> lost_;           // with the reason
  std::vector<std::shared_ptr<Connection>> ended_; // their threads may still be running
  std::map<ModelId, Registered> models_;
  std::map<ModelId, Registered> prepared_;
  std::map<ModelId, std::vector<Parameter>> parameters_; // of the prepared models
  std::map<std::uint64_t, Once> once_;                   // tensors of no model, by name hash
  std::uint64_t onces_ = 0;                              // number of such tensors so far
  std::uint32_t layouts_ = 0;
  std::exception_ptr error_;
  Updates dropped_;
  Updates aggregated_;
  std::set<ServerId> silent_; // servers that have not answered the last inquiry
  std::set<Rank> late_;       // ranks that servers wait for, from their answers
};

} // namespace hvd_order
