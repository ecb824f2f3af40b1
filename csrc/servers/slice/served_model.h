#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "servers/admission/push_windows.h"
#include "servers/admission/routes.h"
#include "servers/slice/served_slice.h"
#include "servers/wire/options.h"
#include "servers/wire/peers.h"
#include "servers/wire/recording.h"

namespace hvd_order {

/// State that all models of a server share; outlives them.
struct ServerRoom {
  explicit ServerRoom(ServerOptions given) : options(std::move(given)) {}

  const ServerOptions options;
  Peers peers;
  PushWindows windows;       // of workers, by rank
  PushWindows helperWindows; // by server
  Routes routes;
  Recording<UpdateTimes> updates; // of workers' pushes, not of copies
};

/// One layout of a model on a server: its slices, the rules of their updates, and the map that
/// assigns them to servers.
///
/// Thread safety: all methods may be called from any thread.
class ServedModel final : public std::enable_shared_from_this<ServedModel> {
 public:
  ServedModel(
      ServerRoom& sharedRoom,
      ModelId number,
      std::uint32_t layoutNumber,
      Registration shapes);
  ServedModel(const ServedModel&) = delete;
  ServedModel& operator=(const ServedModel&) = delete;

  /// The slice with this index. @throws FrameError if there is none.
  [[nodiscard]] ServedSlice& slice(SliceIndex index) const;
  [[nodiscard]] const std::vector<std::unique_ptr<ServedSlice>>& slices() const {
    return slices_;
  }
  [[nodiscard]] FrameHeader about(FrameKind kind, SliceIndex slice) const {
    return {.kind = kind, .model = id, .layout = layout, .slice = slice};
  }

  // Frames of workers about the whole model.
  void setRules(const FrameHeader& header, const Payload& payload);
  void setMap(Peer from, const FrameHeader& header, const Payload& payload);
  void switched(int worker, std::uint32_t map);

  void peersChanged();
  void serverGone(ServerId server);
  void retire();

  ServerRoom& room;
  const ModelId id;
  const std::uint32_t layout;
  const Registration registration;

  mutable std::shared_mutex rulesMutex; ///< guards `rules`; locked after a slice's mutex
  RuleBook rules;

 private:
  [[nodiscard]] bool allSwitched() const;

  static constexpr std::size_t kRulesKept = 64;

  std::vector<std::unique_ptr<ServedSlice>> slices_;
  std::mutex mutex_; // guards what follows; locked before a slice's mutex
  std::uint32_t map_ = 0;
  bool mapped_ = false;
  Payload places_;                        // payload of the map, as received
  std::vector<std::uint32_t> switchedTo_; // by worker: version of the map it uses
};

} // namespace hvd_order
