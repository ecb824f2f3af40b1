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

#include "transport/control_channel.h"

namespace hvd_order {

/// Control messages over send and recv of a Gloo process group that serves nothing else.
///
/// One thread per peer waits in recv (rank 0 has one thread for every other rank, each other rank
/// has one for rank 0). Several recvs are posted ahead: Gloo announces each to the sender, which
/// then sends without asking, and one wake-up of the sender handles many announcements. The caller
/// of `send` posts the send. It completes when the peer receives it, which a frozen peer never
/// does. One more thread waits for completion, only to keep the memory until then. No thread holds
/// a lock while it waits, and none needs Python.
class C10dControl final : public ControlChannel {
 public:
  /// @param group used by no other component.
  C10dControl(c10::intrusive_ptr<c10d::ProcessGroup> group, Rank rank, int size);
  ~C10dControl() override;

  void start(OnMessage onMessage, OnLost onLost) override;
  void send(Rank to, const ControlMessage& message) override;
  void stop() noexcept override;

 private:
  struct Receive {
    at::Tensor frame;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Peer {
    Rank rank;
    std::mutex sending;         // held while one whole message is posted
    std::mutex receiving;       // guards `posted`
    std::deque<Receive> posted; // recvs under way, oldest first
    std::thread listener;
  };

  void listen(Peer& peer);
  void postReceives(Peer& peer);
  std::optional<at::Tensor> receiveFrame(Peer& peer);
  void post(Rank to, const std::vector<std::uint32_t>& words);
  void awaitPosted();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<std::unique_ptr<Peer>> peers_;
  OnMessage onMessage_;
  OnLost onLost_;
  std::atomic<bool> stopping_ = false;

  std::mutex postedMutex_; // guards `posted_` and `ending_`
  std::condition_variable postedChanged_;
  std::deque<c10::intrusive_ptr<c10d::Work>> posted_; // sends under way, oldest first
  bool ending_ = false;                               // no more sends will be posted
  std::thread waiter_;
};

} // namespace hvd_order
