#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "torch/c10d/far_peers.h"
#include "torch/c10d/frames.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Control messages over send and recv of a Gloo process group that serves nothing else.
///
/// A rank listens to its neighbours and to rank 0 with one thread each, and with several recvs
/// posted ahead: Gloo announces each to the sender, which then sends without asking, and one
/// wake-up of the sender handles many announcements. Rank 0 listens to all other ranks together
/// (far_peers.h). The number of threads therefore does not depend on the number of ranks.
///
/// The caller of `send` posts the send. It completes when the peer receives it, which a frozen peer
/// never does. One more thread waits for completion, only to keep the memory until then. No thread
/// holds a lock while it waits, and none needs Python.
class C10dControl final : public ControlChannel {
 public:
  /// @param group used by no other component.
  /// @param neighbours the ranks whose messages are frequent; if one rank is a neighbour of
  ///   another, the other is one of it.
  C10dControl(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      Rank rank,
      int size,
      const std::vector<Rank>& neighbours);
  ~C10dControl() override;

  void start(OnMessage onMessage, OnLost onLost) override;
  void send(Rank to, const ControlMessage& message) override;
  void stop() noexcept override;

 private:
  struct Neighbour {
    Rank rank;
    std::mutex receiving;       // guards `posted`
    std::deque<Receive> posted; // recvs under way, oldest first
    std::thread listener;
  };

  void listen(Neighbour& peer);
  void postReceives(Neighbour& peer);
  std::optional<at::Tensor> receiveFrame(Neighbour& peer);
  void post(Rank to, const ControlMessage& message);
  void awaitPosted();
  void part() noexcept;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const Rank rank_;
  bool nearRankZero_ = false;                     // rank 0 is a neighbour
  std::vector<std::unique_ptr<Neighbour>> peers_; // with a listener each
  FarPeers farPeers_;
  OnMessage onMessage_;
  OnLost onLost_;
  std::atomic<bool> parted_ = false;
  std::atomic<bool> stopping_ = false;

  std::mutex sending_; // held while one whole message is posted

  std::mutex postedMutex_; // guards `posted_` and `ending_`
  std::condition_variable postedChanged_;
  std::deque<c10::intrusive_ptr<c10d::Work>> posted_; // sends under way, oldest first
  bool ending_ = false;                               // no more sends will be posted
  std::thread waiter_;
};

/// The ranks next to this one in the tree.
std::vector<Rank> neighboursInTree(Rank rank, int size);

} // namespace hvd_order
