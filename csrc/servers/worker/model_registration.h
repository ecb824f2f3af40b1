#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/types.h"
#include "servers/arithmetic/update_rule.h"
#include "servers/wire/frame.h"
#include "servers/wire/registration.h"
#include "servers/worker/server_connections.h"

namespace hvd_order {

/// What a worker has told the servers about one layout of a model: its slices, the map that assigns
/// them to servers, and the rules of updates.
///
/// Not thread-safe.
class ModelRegistration final {
 public:
  /// @param places of all slices, by the first map.
  ModelRegistration(
      ModelId model,
      std::uint32_t layout,
      Registration slices,
      std::vector<SliceOwners> places);

  /// Sends a server everything that it needs about the model, before the first push.
  void sendTo(Connection& connection) const;
  /// Uses another map from now on and tells every server so, behind all pushes by the old map.
  /// @return false, and nothing is changed, if this map or a later one is in use.
  bool
  adopt(std::uint32_t map, std::vector<SliceOwners> places, const ServerConnections& connections);
  /// Worker 0: sets the rules of the rounds from `since` on, and sends them to every server.
  /// @param oldest the first round that may still be pushed: a new server needs its rules.
  void setRules(
      const std::vector<UpdateRule>& rules,
      Round since,
      Round oldest,
      const ServerConnections& connections);

  /// Header of a frame about a slice.
  [[nodiscard]] FrameHeader about(FrameKind kind, SliceIndex slice) const {
    return {.kind = kind, .model = model_, .layout = layout_, .slice = slice};
  }
  [[nodiscard]] ModelId model() const {
    return model_;
  }
  [[nodiscard]] std::uint32_t layout() const {
    return layout_;
  }
  [[nodiscard]] bool serversUpdate() const {
    return slices_.serversUpdate;
  }
  /// Version of the map in use; that of the first map is 0.
  [[nodiscard]] std::uint32_t map() const {
    return map_;
  }
  [[nodiscard]] const std::vector<SliceOwners>& places() const {
    return places_;
  }
  /// The owner by the first map. One server gets all parts of a slice's initial state, despite any
  /// move.
  [[nodiscard]] ServerId firstOwner(SliceIndex slice) const {
    return firstPlaces_[slice].owner;
  }

 private:
  struct NumberedRules {
    RulesNumber number;
    Round since;
    std::vector<std::byte> bytes;
  };

  [[nodiscard]] FrameHeader about(const NumberedRules& rules) const;

  const ModelId model_;
  const std::uint32_t layout_;
  const Registration slices_;
  const std::vector<SliceOwners> firstPlaces_;
  std::vector<SliceOwners> places_;
  std::uint32_t map_ = 0;
  std::deque<NumberedRules> rules_; // those that pushes under way may need
  RulesNumber rulesSet_ = 0;
};

} // namespace hvd_order
