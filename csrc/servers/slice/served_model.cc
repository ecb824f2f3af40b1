#include "servers/slice/served_model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace hvd_order {

ServedModel::ServedModel(
    ServerRoom& sharedRoom,
    ModelId number,
    std::uint32_t layoutNumber,
    Registration shapes)
    : room(sharedRoom), id(number), layout(layoutNumber), registration(std::move(shapes)) {
  for (SliceIndex index = 0; index < registration.slices.size(); ++index) {
    slices_.push_back(std::make_unique<ServedSlice>(*this, index));
  }
  switchedTo_.assign(static_cast<std::size_t>(room.options.workers), 0);
}

ServedSlice& ServedModel::slice(SliceIndex index) const {
  if (index >= slices_.size()) {
    throw FrameError(concat("slice ", index, " of model ", id, ", which has ", slices_.size()));
  }
  return *slices_[index];
}

void ServedModel::setRules(const FrameHeader& header, const Payload& payload) {
  if (header.argument == 0 || header.argument > std::numeric_limits<RulesNumber>::max()) {
    throw FrameError(concat("rules of number ", header.argument));
  }
  auto read = std::make_shared<const Rules>(readRules({payload.data(), payload.sizeBytes}));
  std::for_each(read->begin(), read->end(), validate);
  for (const SliceShape& shape : registration.slices) {
    for (const Segment& segment : shape.segments) {
      if (segment.group >= read->size()) {
        throw FrameError(concat("no rule for group ", segment.group));
      }
    }
  }
  {
    const std::unique_lock lock(rulesMutex);
    rules[static_cast<RulesNumber>(header.argument)] = {header.round, std::move(read)};
    // Old rules are for pushes that were applied long ago, or that the oldest kept rules suit as
    // well.
    while (rules.size() > kRulesKept) {
      rules.erase(rules.begin());
    }
  }
  for (const auto& slice : slices_) {
    slice->rulesCame();
  }
}

void ServedModel::setMap(Peer from, const FrameHeader& header, const Payload& payload) {
  const std::vector<SliceOwners> places = readOwners({payload.data(), payload.sizeBytes});
  if (places.size() != slices_.size()) {
    throw FrameError(concat(places.size(), " places for ", slices_.size(), " slices"));
  }
  const std::scoped_lock lock(mutex_);
  if (mapped_ && header.map <= map_) { // every worker sends its map
    if (header.map < map_) {           // a worker that registers late missed earlier changes
      FrameHeader newest = header;
      newest.map = map_;
      room.peers.send(from, Connection::kAtOnce, newest, places_);
    }
    return;
  }
  const bool begins = !mapped_ && header.map == 0;
  if (header.map > 0) { // servers pass worker 0's map on to the other workers
    for (const Peer worker : room.peers.all(PeerKind::kWorker)) {
      room.peers.send(worker, Connection::kAtOnce, header, payload);
    }
  }
  map_ = header.map;
  mapped_ = true;
  places_ = payload;
  const bool all = allSwitched();
  for (SliceIndex index = 0; index < slices_.size(); ++index) {
    slices_[index]->place(places[index], map_, all, begins);
  }
}

void ServedModel::switched(int worker, std::uint32_t map) {
  const std::scoped_lock lock(mutex_);
  auto& version = switchedTo_.at(static_cast<std::size_t>(worker));
  version = std::max(version, map);
  for (const auto& slice : slices_) {
    slice->switched(worker, map);
  }
  if (mapped_ && allSwitched()) {
    for (const auto& slice : slices_) {
      slice->passOnFromNow();
    }
  }
}

bool ServedModel::allSwitched() const {
  return std::all_of(switchedTo_.begin(), switchedTo_.end(), [&](std::uint32_t version) {
    return version >= map_;
  });
}

void ServedModel::peersChanged() {
  for (const auto& slice : slices_) {
    slice->peersChanged();
  }
}

void ServedModel::serverGone(ServerId server) {
  for (const auto& slice : slices_) {
    slice->serverGone(server);
  }
}

void ServedModel::retire() {
  for (const auto& slice : slices_) {
    slice->retire();
  }
}

} // namespace hvd_order
