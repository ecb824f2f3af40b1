#include <array>

#include "world.h"

// A state as one number, for the set of states seen.
//
// `fingerprint` describes the future, not the past: places in the order count from the first slice
// that some rank has not issued yet, so histories that differ only in what is over meet again.

namespace hvd_order::checker {

namespace {

// Mixes one more word into a hash (the finalizer of splitmix64).
std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) + 0x9e3779b97f4a7c15U;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9U;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebU;
  return hash ^ (hash >> 31);
}

} // namespace

void World::hash(Node& node) const {
  StateWords words;
  node.agreements.appendState(words);
  for (const Node::Model& model : node.models) {
    words.push_back(model.registered ? 1 : 0);
    words.insert(words.end(), model.ready.begin(), model.ready.end());
    words.insert(words.end(), model.issued.begin(), model.issued.end());
    words.insert(words.end(), model.done.begin(), model.done.end());
    words.insert(words.end(), model.heard.begin(), model.heard.end());
  }
  words.insert(
      words.end(),
      {node.decides, node.dead, node.heard, node.retuned, node.leftPlan,
       node.held && !node.leftPlan ? 1 + *node.held : 0,
       static_cast<std::uint64_t>(node.reservations)});
  node.hash = 0;
  for (const std::uint64_t word : words) {
    node.hash = mix(node.hash, word);
  }
}

std::uint64_t World::fingerprint() const {
  const std::size_t common = issuedByAll();
  std::uint64_t hash = 0;
  for (const auto& node : nodes_) {
    hash = mix(mix(hash, node->hash), node->issued - common);
    for (const Node::InFlight& slice : node->inFlight) {
      hash = mix(hash, std::uint64_t{slice.slice.word()});
      hash = mix(hash, slice.place < common ? 0 : slice.place - common + 1);
    }
  }
  for (std::size_t place = common; place < order_.size(); ++place) {
    hash = mix(hash, order_[place].word());
  }
  // Only the order of messages between the same two ranks matters.
  std::array<std::uint64_t, kMaxRanks * kMaxRanks> channels{};
  for (const Message& message : messages_) {
    auto& channel = channels[static_cast<std::size_t>(message.from * kMaxRanks + message.to)];
    channel = mix(mix(channel, message.number), message.slices->size() + 1);
    for (const SliceKey slice : *message.slices) {
      channel = mix(channel, slice.word());
    }
  }
  for (const std::uint64_t channel : channels) {
    hash = mix(hash, channel);
  }
  return hash;
}

} // namespace hvd_order::checker
