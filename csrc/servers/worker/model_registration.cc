#include "servers/worker/model_registration.h"

#include <utility>

// A server learns of a model by three kinds of frames, ahead of all pushes: the slices (kModel),
// the map (kMap) and the rules (kRule). A server that comes later gets the same from `sendTo`, with
// all rules that pushes under way may need.
//
// A new map reaches every server ahead of the frames that wait, and is followed by kSwitch behind
// them: this worker sends no more pushes by an older map. served_slice.cc relies on that order when
// it moves a slice.
namespace hvd_order {

ModelRegistration::ModelRegistration(
    ModelId model,
    std::uint32_t layout,
    Registration slices,
    std::vector<SliceOwners> places)
    : model_(model),
      layout_(layout),
      slices_(std::move(slices)),
      firstPlaces_(places),
      places_(std::move(places)) {}

void ModelRegistration::sendTo(Connection& connection) const {
  FrameHeader header = about(FrameKind::kModel, 0);
  header.map = map_;
  connection.send(Connection::kAtOnce, header, Payload::copyOf(writeRegistration(slices_)));
  header.kind = FrameKind::kMap;
  connection.send(Connection::kAtOnce, header, Payload::copyOf(writeOwners(places_)));
  for (const NumberedRules& rules : rules_) {
    connection.send(Connection::kAtOnce, about(rules), Payload::copyOf(rules.bytes));
  }
}

bool ModelRegistration::adopt(
    std::uint32_t map,
    std::vector<SliceOwners> places,
    const ServerConnections& connections) {
  if (map <= map_) {
    return false;
  }
  map_ = map;
  places_ = std::move(places);
  FrameHeader header = about(FrameKind::kMap, 0);
  header.map = map;
  connections.sendToAll(Connection::kAtOnce, header, Payload::copyOf(writeOwners(places_)));
  header.kind = FrameKind::kSwitch;
  connections.sendToAll(Connection::kLast, header, {});
  return true;
}

void ModelRegistration::setRules(
    const std::vector<UpdateRule>& rules,
    Round since,
    Round oldest,
    const ServerConnections& connections) {
  rules_.push_back({++rulesSet_, since, writeRules(rules)});
  while (rules_.size() > 1 && rules_[1].since <= oldest) {
    rules_.pop_front();
  }
  const NumberedRules& newest = rules_.back();
  connections.sendToAll(Connection::kAtOnce, about(newest), Payload::copyOf(newest.bytes));
}

FrameHeader ModelRegistration::about(const NumberedRules& rules) const {
  FrameHeader header = about(FrameKind::kRule, 0);
  header.round = rules.since;
  header.argument = rules.number;
  return header;
}

} // namespace hvd_order
