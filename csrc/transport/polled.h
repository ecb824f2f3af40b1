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

/// Transport and control channel for libraries that must be polled, such as MPI. An external
/// thread moves the bytes: it takes slices and messages from the port, and reports results to it.
///
/// Thread safety: every method may be called from any thread; `received` and `lost` from one
/// thread at a time. The owner of the external thread calls `close` before that thread ends.
class PolledPort final : public std::enable_shared_from_this<PolledPort> {
 public:
  /// A slice to sum over all ranks, in place, in the order of the numbers.
  struct Issued {
    std::uint64_t number;
    ModelId model;
    BufferId buffer;
    std::byte* memory;
    ByteCount sizeBytes;
  };
  /// A control message to send; the first of `words` is its kind.
  struct Outgoing {
    Rank to;
    std::vector<std::uint32_t> words;
  };

  static std::shared_ptr<PolledPort> create();
  PolledPort(const PolledPort&) = delete;
  PolledPort& operator=(const PolledPort&) = delete;

  [[nodiscard]] std::shared_ptr<Transport> transport();
  [[nodiscard]] std::shared_ptr<ControlChannel> control();

  /// Registers the gradient buffers of a model, by BufferId; they must outlive the use of the
  /// model.
  void setBuffers(ModelId model, std::vector<std::byte*> buffers);
  void removeBuffers(ModelId model);

  // ---- for the thread that moves the bytes ----
  /// Waits until there is a slice or message to take, at most `atMost`.
  void wait(std::chrono::nanoseconds atMost);
  [[nodiscard]] std::optional<Issued> nextSlice();
  [[nodiscard]] std::optional<Outgoing> nextMessage();
  /// Reports that a slice has been summed. @param error empty, or why the sum failed.
  void done(std::uint64_t number, const std::string& error);
  void received(Rank from, const std::vector<std::uint32_t>& words);
  void lost(Rank peer, const std::string& why);
  /// Fails the slices that have not been summed. Later slices and messages are rejected.
  void close();

 private:
  friend class PolledTransport;
  friend class PolledControl;

  PolledPort() = default;
  void issue(SliceKey key, const Slice& slice, Transport::Done done);
  void send(Rank to, const ControlMessage& message);
  void listen(ControlChannel::OnMessage onMessage, ControlChannel::OnLost onLost);
  void silence() noexcept;

  std::mutex mutex_; // guards the members below; no callback runs under it
  std::condition_variable wakeUp_;
  std::condition_variable sent_;
  std::map<ModelId, std::vector<std::byte*>> buffers_;
  std::deque<Issued> slices_;
  std::map<std::uint64_t, Transport::Done> underWay_;
  std::deque<Outgoing> messages_;
  std::uint64_t next_ = 0;
  bool closed_ = false;

  std::mutex listenersMutex_; // held during calls, so that `silence` returns after the last
  ControlChannel::OnMessage onMessage_;
  ControlChannel::OnLost onLost_;
};

} // namespace hvd_order
