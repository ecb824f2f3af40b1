#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "servers/wire/connection.h"
#include "servers/wire/recording.h"

namespace hvd_order {

/// A connection over a Gloo process group of two members.
///
/// One thread sends: always the most urgent frame, one frame at a time, so that urgent frames can
/// overtake waiting ones. One thread receives. Gloo sends only what its receiver has posted. So
/// the receiver keeps a few frames posted: few, because a frame on its way cannot be overtaken,
/// but enough that the connection never waits for the receiver.
///
/// Its threads keep it alive, so a function that they call may drop the last other owner.
class PairConnection final : public Connection,
                             public std::enable_shared_from_this<PairConnection> {
 public:
  /// @param group of two members, used by no other component.
  /// @param sends session number in the frames of this end, `receives` in those of the other end;
  ///   only the two ends know these numbers.
  /// @param largestPayload bytes. A larger payload is never sent, and receiving one ends the
  ///   process.
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

  /// Of received pushes and answers about slices; may be turned on at any time.
  Recording<ReceivedTimes> received;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Header = std::array<std::byte, kFrameHeaderBytes>;

  /// Frames posted ahead: the credit of a connection.
  static constexpr std::uint64_t kDepth = 3;

  struct QueuedFrame {
    std::uint64_t urgency;
    std::uint64_t order;
    FrameHeader header;
    Payload payload;
    friend bool operator<(const QueuedFrame& a, const QueuedFrame& b) { // the greatest goes next
      return a.urgency != b.urgency ? a.urgency > b.urgency : a.order > b.order;
    }
  };
  struct Posted {
    Header header;
    Payload payload;
    Work headerWork;
    Work payloadWork;
    std::exception_ptr notPosted; // why nothing is posted here any more
  };

  void sendAll();
  void transmit(QueuedFrame frame);
  void listen();
  bool receive();
  void post(std::size_t place, bool withPayload);
  Work posted(const std::function<Work()>& begin);
  void lost(const std::string& why);
  void abortWork() noexcept;
  void letGo();

  c10::intrusive_ptr<c10d::Backend>
      group_;      // null after the connection is lost and both threads have ended
  const int peer_; // its rank in the group
  const std::uint64_t sends_;
  const std::uint64_t receives_;
  const std::size_t largestPayload_;
  const std::shared_ptr<BufferPool> pool_;
  OnFrame onFrame_;
  OnLost onLost_;

  std::mutex queueMutex_; // guards what follows
  std::condition_variable queueChanged_;
  std::priority_queue<QueuedFrame> queue_;
  std::uint64_t queued_ = 0; // frames so far
  bool sending_ = false;
  bool broken_ = false; // the connection is lost: no more frames can be sent

  std::mutex workMutex_; // guards the start and abort of work
  std::vector<Work> underWay_;
  std::optional<std::string> brokenOff_; // the reason
  std::atomic<bool> stopping_ = false;
  std::uint64_t sent_ = 0; // of the sending thread

  // Of the listening thread:
  std::array<Posted, kDepth> posted_;
  std::uint64_t received_ = 0;
  std::int64_t lastCameNs_ = 0; // the last frame was complete

  std::atomic<int> threads_ = 2; // threads that may still use the group

  std::thread sender_;
  std::thread listener_;
};

} // namespace hvd_order
