#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/control_channel.h"
#include "transport/transport.h"

namespace hvd_order {

/// Transport and control channel of an engine whose bytes are moved by a thread outside, which asks
/// what is to be done and tells what has happened. For libraries that have to be polled, as MPI.
///
/// Thread safety: every method may be called from any thread; `received` and `lost` from one at a
/// time. Whoever owns the moving thread calls `close` before it ends.
class PolledPort final : public std::enable_shared_from_this<PolledPort> {
 public:
  /// A slice to be summed over all ranks, in place, in the order of the numbers.
  struct Issued {
    std::uint64_t number;
    ModelId model;
    BufferId buffer;
    std::byte* memory;
    ByteCount sizeBytes;
  };
  /// A control message to be sent; `words` begins with its kind.
  struct Outgoing {
    Rank to;
    std::vector<std::uint32_t> words;
  };

  static std::shared_ptr<PolledPort> create();
  PolledPort(const PolledPort&) = delete;
  PolledPort& operator=(const PolledPort&) = delete;

  [[nodiscard]] std::shared_ptr<Transport> transport();
  [[nodiscard]] std::shared_ptr<ControlChannel> control();

  /// Registers the gradient buffers of a model, by BufferId; they must outlive its use.
  void setBuffers(ModelId model, std::vector<std::byte*> buffers);
  void removeBuffers(ModelId model);

  // ---- for the thread that moves the bytes ----
  /// Waits until there is something to do, at most so long.
  void wait(std::chrono::nanoseconds atMost);
  [[nodiscard]] std::optional<Issued> nextSlice();
  [[nodiscard]] std::optional<Outgoing> nextMessage();
  /// A slice has been summed. @param error empty, or why it was not.
  void done(std::uint64_t number, const std::string& error);
  void received(Rank from, const std::vector<std::uint32_t>& words);
  void lost(Rank peer, const std::string& why);
  /// Fails what has not been summed; nothing is taken any more.
  void close();

 private:
  friend class PolledTransport;
  friend class PolledControl;

  PolledPort() = default;
  void issue(SliceKey key, const Slice& slice, Transport::Done done);
  void send(Rank to, const ControlMessage& message);
  void listen(ControlChannel::OnMessage onMessage, ControlChannel::OnLost onLost);
  void silence() noexcept;

  std::mutex mutex_; // guards what follows; nothing is called under it
  std::condition_variable wakeUp_;
  std::condition_variable sent_;
  std::map<ModelId, std::vector<std::byte*>> buffers_;
  std::deque<Issued> slices_;
  std::map<std::uint64_t, Transport::Done> underWay_;
  std::deque<Outgoing> messages_;
  std::uint64_t next_ = 0;
  bool closed_ = false;

  std::mutex listenersMutex_; // held while they are called, so that `silence` comes after the last
  ControlChannel::OnMessage onMessage_;
  ControlChannel::OnLost onLost_;
};

} // namespace hvd_order
