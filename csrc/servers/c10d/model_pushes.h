#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "servers/wire/frame.h"
#include "servers/wire/payload.h"
#include "servers/worker/model_registration.h"
#include "servers/worker/server_connections.h"
#include "transport/transport.h"

namespace hvd_order {

/// How a worker sends its pushes, the same for all models.
struct PushSettings {
  Rank rank;
  int workers;
  bool ordered;   ///< of the frames that wait for a connection, the most urgent goes next; else the
                  ///< oldest
  bool asksFirst; ///< servers bound the delay of updates: each push waits until it is admitted
};

/// A worker's pushes and pulls of one layout of a model: what is under way, to which server, and
/// what an answer is for.
///
/// Not thread-safe; only `send` of the connections is called.
class ModelPushes final {
 public:
  using Done = Transport::Done;

  /// A slice of the model on this worker.
  struct SliceView {
    at::Tensor tensor;
    std::string name;
  };
  /// What an answer is for, and where its payload goes. `done` is null for an answer to a pull.
  struct Expected {
    at::Tensor tensor;
    Done done;
    ByteCount droppedBytes = 0; ///< of an update that would have been too late and was not sent
  };

  /// @param connections must outlive this object.
  ModelPushes(
      const PushSettings& settings,
      ServerConnections& connections,
      ModelRegistration registration,
      std::vector<SliceView> slices);

  [[nodiscard]] const ModelRegistration& registration() const {
    return registration_;
  }
  /// Whether the model is of this layout and has the slice.
  [[nodiscard]] bool isAbout(const FrameHeader& header) const {
    return header.layout == registration_.layout() && header.slice < slices_.size();
  }

  /// Same as ServerTransport::beginWithBuffers.
  void sendState(std::uint32_t part, std::uint32_t parts, std::uint64_t stepsBefore) const;
  void setRules(const std::vector<UpdateRule>& rules);
  /// Uses a newer map, and repeats pushes that were under way to a lost server.
  void adopt(std::uint32_t map, std::vector<SliceOwners> places);

  /// Starts a round of a slice. @throws ServerLost if its state is lost, or what the gradient's
  /// device throws; nothing is under way then.
  void begin(SliceIndex slice, Done done);
  /// Sends a push that the server has admitted.
  /// @return the bytes of a push that went to a helper; 0 if none did.
  ByteCount admitted(ServerId server, const FrameHeader& header);
  /// Takes out what this answer is for; nothing if no answer is expected, because another server
  /// that is lost now gave it. @throws FrameError if the answer does not fit.
  std::optional<Expected> take(ServerId server, const FrameHeader& header, const Payload& payload);
  /// The payload of an answer is in its place, or could not be written there.
  /// @param wasPush of a push; else to a pull.
  void finish(SliceIndex slice, bool wasPush, const std::exception_ptr& error);
  /// A server is lost: repeats what it had, or was to receive from other servers.
  void serverLost();

  [[nodiscard]] bool waits() const;
  /// The owners of a slice under way whose state is lost. An idle slice does not count: other
  /// workers may have dropped the model long ago.
  [[nodiscard]] std::optional<SliceOwners> lostForGood() const;
  /// Names the slices under way, each with its server.
  [[nodiscard]] std::vector<std::string> namesUnderWay() const;
  /// Removes and returns the callbacks of everything under way.
  [[nodiscard]] std::vector<Done> takeAll();
  /// Number of updates that the last answer included, with those before the registration.
  [[nodiscard]] std::uint64_t steps() const {
    return steps_;
  }

  struct PullProgress {
    std::uint32_t part;
    std::vector<bool> isTaken;       // by slice: its answer is in the buffer, or being written
    std::vector<SliceIndex> arrived; // in the order in which they came
    std::exception_ptr error;        // why the rest will not come
    [[nodiscard]] bool isWhole() const {
      return arrived.size() == isTaken.size();
    }
  };
  /// Begins a pull of one part of all slices. @throws InvalidUsage if one is under way or has
  /// failed.
  std::shared_ptr<const PullProgress> beginPull(std::uint32_t part);
  /// Requests all slices from their owners.
  void requestAll();
  /// The caller no longer waits for the pull.
  void endPull(const std::shared_ptr<const PullProgress>& pull);

 private:
  struct UnderWay {
    Done done; // null once the answer has been taken
    Round round;
    ServerId server;
    bool isRepeated = false; // the gradient has been given to a connection before
  };

  void push(SliceIndex slice);
  void ask(Connection& connection, FrameHeader header, std::uint16_t flags) const;
  Payload gradientOf(SliceIndex slice);
  void repeatLost();
  void markOver(SliceIndex slice) const;
  void requestPart(SliceIndex slice);
  [[nodiscard]] std::uint64_t urgencyOf(SliceIndex slice) const;
  [[nodiscard]] bool asksFirst() const {
    return settings_.asksFirst && registration_.serversUpdate();
  }

  const PushSettings settings_;
  ServerConnections& connections_;
  ModelRegistration registration_;
  const std::vector<SliceView> slices_;
  std::vector<Round> rounds_;                     // pushes so far, by slice
  std::vector<std::optional<UnderWay>> underWay_; // by slice
  std::vector<std::uint64_t> read_;               // by slice: updates that its last answer included
  std::uint64_t steps_ = 0;
  bool mayHaveLost_ = false; // pushes may be lost until a map names no lost server
  std::shared_ptr<PullProgress> pull_;
  bool pulledInVain_ = false; // answers to a pull that failed may still come
};

} // namespace hvd_order
