#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "server/wire/connection.h"

namespace hvd_order {

/// A connection over a Gloo process group of two members.
///
/// Two threads: one sends what is most urgent, one frame at a time, so that what waits can still be
/// overtaken; one receives. Gloo sends what its receiver has posted, and nothing before. So the
/// receiver keeps a few frames posted: few, as what is on its way cannot be overtaken, and so many
/// that the line never waits for the receiver's word.
class PairConnection final : public Connection {
 public:
  /// @param group of two members, used by nobody else.
  /// @param sends number in the frames of this end, `receives` in those of the other; the two ends
  ///   know them and nobody else.
  /// @param largestPayload bytes; a larger one is never sent, and ends the process that gets it.
  PairConnection(
      c10::intrusive_ptr<c10d::Backend> group,
      std::uint64_t sends,
      std::uint64_t receives,
      std::size_t largestPayload);
  ~PairConnection() override;

  void start(OnFrame onFrame, OnLost onLost) override;
  void send(std::uint64_t urgency, FrameHeader header, Payload payload) override;
  void breakOff(const std::string& why) noexcept override;
  void stop() noexcept override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Header = std::array<std::byte, kFrameHeaderBytes>;

  /// Frames posted ahead: the credit of a line.
  static constexpr std::uint64_t kDepth = 3;

  struct Waiting {
    std::uint64_t urgency;
    std::uint64_t order;
    FrameHeader header;
    Payload payload;
    friend bool operator<(const Waiting& a, const Waiting& b) { // the greatest is the next
      return a.urgency != b.urgency ? a.urgency > b.urgency : a.order > b.order;
    }
  };
  struct Posted {
    Header header;
    Payload payload;
    Work headerWork;
    Work payloadWork;
  };

  void sendAll();
  void transmit(Waiting frame);
  void listen();
  bool receive();
  void post(std::size_t place, bool withPayload);
  Work posted(const std::function<Work()>& begin);
  void lost(const std::string& why);
  void abortWork() noexcept;
  void letGo();

  c10::intrusive_ptr<c10d::Backend>
      group_;      // null once the connection is lost and both threads are done
  const int peer_; // its rank in the group
  const std::uint64_t sends_;
  const std::uint64_t receives_;
  const std::size_t largestPayload_;
  const std::shared_ptr<BufferPool> pool_;
  OnFrame onFrame_;
  OnLost onLost_;

  std::mutex queueMutex_; // guards what follows
  std::condition_variable queueChanged_;
  std::priority_queue<Waiting> queue_;
  std::uint64_t queued_ = 0; // frames so far
  bool sending_ = false;
  bool broken_ = false; // the line is lost: nothing more can go out

  std::mutex workMutex_; // guards beginning and aborting work
  std::vector<Work> underWay_;
  std::optional<std::string> brokenOff_; // and why
  std::atomic<bool> stopping_ = false;
  std::uint64_t sent_ = 0; // of the sending thread

  std::array<Posted, kDepth> posted_; // of the listening thread
  std::uint64_t received_ = 0;        // of the listening thread

  std::atomic<int> threads_ = 2; // that may use the group

  std::thread sender_;
  std::thread listener_;
};

} // namespace hvd_order
