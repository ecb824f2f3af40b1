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
#include "c10d/torch_transport.h"
#include "server/slice/held_slice.h"
#include "server/wire/connection.h"
#include "server/wire/registration.h"

namespace hvd_order {

/// Carries slices to parameter servers and what they answer back: the sum over the workers, or the
/// updated parameters.
///
/// Each worker pushes in its own order; which server a slice goes to is said by a map, the same on
/// all workers, that changes when servers come, go or slow down (server_core.h says how slices
/// move). When a server is lost, what was under way to it is sent again to the next owner.
///
/// Thread safety: as TorchTransport.
class ServerTransport final : public TorchTransport,
                              public std::enable_shared_from_this<ServerTransport> {
 public:
  /// What a server did since it was asked last, as this worker saw it.
  struct Figures {
    ServerId server;
    ByteCount bytes;    ///< of answers
    double busySeconds; ///< with something of this worker's under way to it
  };
  struct Updates {
    std::uint64_t slices = 0;
    ByteCount bytes = 0;
  };
  /// Elements of a tensor that are a parameter (the rest is padding), and its rules' number.
  struct Parameter {
    std::uint32_t elements;
    std::uint32_t group;
  };
  /// A server is gone, or has sent a control text. Called on a connection's thread.
  using OnLost = std::function<void(ServerId server, const std::string& why)>;
  using OnControl = std::function<void(ServerId server, const std::string& text)>;

  /// @param ordered of what waits for a line, the most urgent goes next; else the first.
  /// @param asksFirst servers bound the delay of updates: each push waits until it is admitted.
  ServerTransport(
      Rank rank,
      int workers,
      bool ordered,
      bool asksFirst,
      OnLost onLost,
      OnControl onControl);
  ~ServerTransport() override;

  /// Takes up a connection and tells the server of all models. @throws InvalidUsage if there is
  /// one.
  void connect(ServerId server, std::shared_ptr<Connection> connection);
  [[nodiscard]] std::vector<ServerId> servers() const;
  /// Counts these as lost, all at once; worker 0 tells the others so. Their connections are closed,
  /// so that none is believed that is still there. Those that are not connected are left out.
  void giveUp(const std::vector<ServerId>& servers, const std::string& why);
  /// Frames that have come from each server.
  [[nodiscard]] std::map<ServerId, std::uint64_t> framesFrom() const;
  /// Whether something is under way to some server.
  [[nodiscard]] bool waits() const;
  void sendControl(ServerId server, const std::string& text);

  /// Says what the next `setBuffers` of the model is for. Without parameters, servers only sum.
  /// @param places of all slices; the same on every worker.
  /// @param parameters by TensorId, where servers update; else empty.
  void prepare(ModelId model, std::vector<Placement> places, std::vector<Parameter> parameters);
  /// Collective: every worker calls it in the same order.
  /// @throws InvalidUsage without `prepare`, or if the places do not fit the slices.
  void setBuffers(ModelId model, const std::vector<at::Tensor>& buffers, const SliceLayout& layout)
      override;
  void removeBuffers(ModelId model) override;

  /// Worker 0: the buffers hold a part of the state to begin with, the parameters (1) first, then
  /// each of the optimizer's moments (2 and up); `parts` with the one that is sent along unasked.
  void beginWithBuffers(
      ModelId model,
      std::uint32_t part,
      std::uint32_t parts,
      std::uint64_t stepsBefore);
  /// Worker 0: the rules for all pushes that come.
  void setRules(ModelId model, const std::vector<UpdateRule>& rules);
  /// Worker 0: who holds what from now on. The others have it from the servers. Nothing happens to
  /// a model that is gone.
  void setMap(ModelId model, std::vector<Placement> places);
  [[nodiscard]] std::vector<Placement> places(ModelId model) const;

  /// Fills the idle buffers with what the servers have: the parameters or sums (part 1), or one of
  /// the optimizer's moments (2 and up). The first slice comes first. Blocks.
  /// @return the slices in the order in which they came.
  /// @throws TransferTimeout, or PeerLost.
  std::vector<SliceIndex> pull(ModelId model, std::uint32_t part, std::chrono::nanoseconds timeout);

  /// Updates that the last answer about the model had seen, those before its registration too.
  [[nodiscard]] std::uint64_t steps(ModelId model) const;

  std::vector<Figures> takeFigures();
  /// Those that would have come too late and were not sent.
  [[nodiscard]] Updates dropped() const;
  /// Those that were sent to another server, to be added up with others'.
  [[nodiscard]] Updates aggregated() const;

  void issue(SliceKey key, const Slice& slice, Done done) override;
  void inquire() override;
  [[nodiscard]] std::string report() const override;
  void abort() noexcept override;
  /// Says goodbye to all servers and ends the connections. What is under way fails.
  void close() noexcept;

 private:
  struct UnderWay {
    Done done;
    Round round;
    ServerId server;
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
    bool hasLost = false; // what is under way may be lost until a map names no lost server
    std::vector<at::Tensor> views;
    std::vector<std::string> names;                // of the slices
    std::vector<Round> rounds;                     // pushes so far, by slice
    std::vector<std::optional<UnderWay>> underWay; // by slice
    std::deque<GivenRules> rules;                  // worker 0 only
    RulesNumber rulesGiven = 0;
    std::uint64_t steps = 0;         // updates that the last answer has seen
    std::vector<std::uint64_t> read; // the same of each slice
  };
  struct Line {
    std::shared_ptr<Connection> connection;
    std::uint64_t frames = 0; // that have come
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
  Line& lineFor(ServerId server);
  [[nodiscard]] bool isLost(const Placement& place) const;
  [[nodiscard]] std::optional<Placement> lostForGood() const;
  [[nodiscard]] PeerLost lossOf(const Placement& place) const;
  void busy(Line& line);
  void idle(ServerId server);

  // server_pushes.cc, with `issue` and `pull`:
  void allReduce(const at::Tensor& tensor, const std::string& name, Done done) override;
  void onFrame(ServerId server, const FrameHeader& header, const Payload& payload);
  void answered(ServerId server, const FrameHeader& header, const Payload& payload);
  void admitted(ServerId server, const FrameHeader& header);
  // Under the lock:
  void push(ModelId model, Registered& registered, SliceIndex slice);
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

  mutable std::mutex
      mutex_; // guards what follows; nothing is called under it but connections' send
  std::condition_variable changed_;
  std::map<ServerId, Line> lines_;
  std::map<ServerId, std::string> lost_;           // and why
  std::vector<std::shared_ptr<Connection>> ended_; // their threads may be about to end
  std::map<ModelId, Registered> models_;
  std::map<ModelId, Registered> prepared_;
  std::map<ModelId, std::vector<Parameter>> parameters_;      // of the prepared
  std::map<std::uint64_t, std::pair<at::Tensor, Done>> once_; // tensors of no model, by name
  std::uint64_t onces_ = 0;                                   // of those so far
  std::uint32_t layouts_ = 0;
  std::exception_ptr error_;
  Updates dropped_;
  Updates aggregated_;
  std::set<ServerId> silent_;                 // have not answered the last inquiry
  std::set<Rank> late_;                       // ranks that servers wait for, by their answers
  std::vector<SliceIndex>* pulled_ = nullptr; // of the pull that goes on
};

} // namespace hvd_order
