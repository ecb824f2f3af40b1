#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "torch/c10d/frames.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Rank 0's receiver of the messages of all ranks that are not its neighbours in the tree: one
/// listener and one clock, however many ranks there are. A message from such a rank is several
/// times slower than one that a recv has been posted for in advance, so it should be rare.
class FarPeers final {
 public:
  /// @param tag of messages from these peers; the next tag is used as well.
  FarPeers(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<Rank> peers, int tag);
  ~FarPeers();
  FarPeers(const FarPeers&) = delete;
  FarPeers& operator=(const FarPeers&) = delete;

  /// Starts listening. Both functions are called from one thread; see ControlChannel::start.
  void start(ControlChannel::OnMessage onMessage, ControlChannel::OnLost onLost);
  /// No function is called after it returns. A second call has no effect.
  void stop() noexcept;

 private:
  struct FarPeer {
    Receive probe; // never completed: it fails when the connection breaks
    Assembly assembly;
  };

  void replenish();
  void tick();
  void listen();
  void dropOldest();
  void look();
  void takeArrived();
  void take(const Receive& receive);
  std::map<Rank, std::exception_ptr> broken();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const int tag_;
  std::map<Rank, FarPeer> peers_; // those not lost; used by the listener only, once it runs
  ControlChannel::OnMessage onMessage_;
  ControlChannel::OnLost onLost_;

  std::mutex mutex_;             // guards changes of receives_, and `stopping_`
  std::deque<Receive> receives_; // from any source, oldest first
  bool stopping_ = false;
  std::condition_variable stopped_;
  std::thread listener_;
  std::thread clock_;
};

} // namespace hvd_order
