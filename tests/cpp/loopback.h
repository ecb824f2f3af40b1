#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/control_channel.h"
#include "transport/transport.h"

namespace hvd_order {

/// Several ranks inside one process, for tests and as a reference for the behaviour of a
/// transport.
///
/// Every rank's engine gets `transport(rank)` and `control(rank)`. A slice is summed, in float,
/// when all ranks have issued it. A reduce-scatter leaves a rank its shard, and not-a-number in the
/// rest of the slice, so that nobody relies on the rest. Like a collective library, the world
/// matches the k-th issues of the ranks, so ranks that issue different slices get an error that
/// names them. A thread of the world reports completion. `killRank` simulates a failure.
class LoopbackWorld final : public std::enable_shared_from_this<LoopbackWorld> {
 public:
  static std::shared_ptr<LoopbackWorld> create(int size);
  ~LoopbackWorld();
  LoopbackWorld(const LoopbackWorld&) = delete;
  LoopbackWorld& operator=(const LoopbackWorld&) = delete;

  [[nodiscard]] std::shared_ptr<Transport> transport(Rank rank);
  [[nodiscard]] std::shared_ptr<ControlChannel> control(Rank rank);

  /// Registers the gradient buffers of a rank's model; they must outlive the use of the model.
  void setBuffers(Rank rank, ModelId model, std::vector<float*> buffers);

  /// Simulates the death of the rank's process: its issues are ignored, transfers that need it
  /// fail on the other ranks, and its control connections break.
  void killRank(Rank rank);

  /// Returns the slices in the order in which they were summed.
  [[nodiscard]] std::vector<SliceKey> history() const;

 private:
  friend class LoopbackTransport;
  friend class LoopbackControl;

  struct Issue {
    Rank rank;
    SliceKey key;
    Slice slice;
    Transport::Done done;
  };
  struct ControlListener {
    ControlChannel::OnMessage onMessage;
    ControlChannel::OnLost onLost;
  };

  explicit LoopbackWorld(int size);
  void issue(Issue issue);
  void send(Rank from, Rank to, ControlMessage message);
  void listen(Rank rank, ControlListener listener);
  void silence(Rank rank);
  void post(std::function<void()> work);
  void postLocked(std::function<void()> work);
  void run();
  void finish(std::vector<Issue> issues);
  void carry(const std::vector<Issue>& issues);

  const int size_;
  mutable std::mutex mutex_; // guards all below; callbacks run without it, on thread_
  std::condition_variable wakeUp_;
  std::vector<std::function<void()>> work_;
  std::vector<bool> dead_;
  std::vector<std::size_t> issued_;                       // by rank: number of issues so far
  std::map<std::size_t, std::vector<Issue>> rounds_;      // by number of issue
  std::vector<std::vector<std::vector<float*>>> buffers_; // by rank, model, buffer
  std::vector<SliceKey> history_;
  bool stop_ = false;
  // Held while a listener is called, so that `silence` returns only after its last call.
  std::mutex listenersMutex_;
  std::map<Rank, ControlListener> listeners_;
  std::map<Rank, int> turns_; // by rank: number of times it started or stopped listening
  std::vector<std::pair<Rank, std::function<void(const ControlListener&)>>> undelivered_;
  // Becomes false when a callback on thread_ destroys the last owner; used on thread_ only.
  const std::shared_ptr<bool> exists_ = std::make_shared<bool>(true);
  std::thread thread_;
};

} // namespace hvd_order
