#include "servers/c10d/model_pushes.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "servers/c10d/tensor_payload.h"
#include "servers/wire/arguments.h"
#include "servers/wire/recording.h"

// The worker's half of a push: gradient out, answer in.
//
// `begin` starts a round of a slice: it sends the gradient to the slice's owner, or, where servers
// bound the delay of updates, a request. The server then admits the push, directly or through a
// helper (`admitted`), or answers at once if the update would be too late. `take` says where an
// answer belongs, and `finish` ends the round when it is there.
//
// For every slice the worker keeps the round of its last push and whether that push is under way.
// That suffices to repeat it: the gradient stays in the buffer until the slice is done, and servers
// recognise repeated pushes by worker and round.
//
// Invariant: a slice has at most one push under way, and its buffer keeps the gradient until the
// answer is written. So the push can be repeated at any moment (`push`), for example to another
// owner, and an answer counts only if its round is the one under way: a later answer to the same
// round finds no `done` and is ignored. The first push of a round shares the buffer's memory. A
// repeated one is a copy: an answer that another server sent before may come while the push still
// waits in the queue of its connection, and would travel as the gradient. A replica that lacks
// that round (divergence bound) would apply it.
//
// Invariant: while a map names a lost server, and once more with the map after that, every push
// under way is sent again, and the owner of every idle slice is told which round is over
// (`repeatLost`, `markOver`). So a replica that takes over misses neither a push nor the end of a
// round.
//
// Nothing is taken out, and nothing left behind, by a call that throws: a slice whose `begin`
// throws is not under way, and an answer that does not fit leaves its slice to the connection's
// loss.
namespace hvd_order {

ModelPushes::ModelPushes(
    const PushSettings& settings,
    ServerConnections& connections,
    ModelRegistration registration,
    std::vector<SliceView> slices)
    : settings_(settings),
      connections_(connections),
      registration_(std::move(registration)),
      slices_(std::move(slices)),
      rounds_(slices_.size(), 0),
      underWay_(slices_.size()),
      read_(slices_.size(), 0) {}

// -------------------------------------------------------------------------------- state and rules

void ModelPushes::sendState(std::uint32_t part, std::uint32_t parts, std::uint64_t stepsBefore)
    const {
  for (SliceIndex slice = 0; slice < slices_.size(); ++slice) {
    Connection& owner = connections_.at(registration_.firstOwner(slice));
    FrameHeader header = registration_.about(FrameKind::kState, slice);
    if (part == kValuePart) {
      ByteWriter counters;
      counters.put(stepsBefore);
      for (int number = 0; number < 2 * settings_.workers; ++number) { // rounds seen and skipped
        counters.put(Round{0});
      }
      header.argument = StateArgument{parts, kCountersPart}.packed();
      owner.send(Connection::kAtOnce, header, Payload::copyOf(counters.bytes()));
    }
    header.argument = StateArgument{parts, part}.packed();
    const Payload values = payloadOf(slices_[slice].tensor);
    // A copy, because the buffers are written again before the send completes.
    owner.send(
        Connection::kAtOnce, header, Payload::copyOf(std::span(values.data(), values.sizeBytes)));
  }
}

void ModelPushes::setRules(const std::vector<UpdateRule>& rules) {
  registration_.setRules(
      rules, std::ranges::max(rounds_) + 1, std::ranges::min(rounds_), connections_);
}

void ModelPushes::adopt(std::uint32_t map, std::vector<SliceOwners> places) {
  if (registration_.adopt(map, std::move(places), connections_)) {
    repeatLost();
  }
}

// ----------------------------------------------------------------------------------------- pushes

void ModelPushes::begin(SliceIndex slice, Done done) {
  if (const SliceOwners& place = registration_.places().at(slice); connections_.isLost(place)) {
    throw connections_.lossOf(place, settings_.rank);
  }
  auto& underWay = underWay_[slice];
  HVDO_CHECK(!underWay, "slice ", slice, " is under way already");
  underWay = UnderWay{std::move(done), ++rounds_[slice], kNoServer};
  try {
    push(slice);
  } catch (...) { // the slice counts as failed, so nobody may call `done` later
    underWay.reset();
    --rounds_[slice];
    throw;
  }
}

void ModelPushes::push(SliceIndex slice) {
  UnderWay& underWay = *underWay_[slice];
  connections_.pushEnded(std::exchange(underWay.server, kNoServer), steadySeconds());
  const ServerId owner = registration_.places()[slice].owner;
  Connection* const connection = connections_.find(owner);
  if (connection == nullptr) {
    underWay.server = owner;
    return; // lost: the slice is sent when a new map names its owner
  }
  FrameHeader header = registration_.about(FrameKind::kPush, slice);
  header.round = underWay.round;
  header.map = registration_.map();
  if (asksFirst()) {
    ask(*connection, header, 0);
  } else {
    connection->send(urgencyOf(slice), header, gradientOf(slice));
  }
  underWay.server = owner;
  connections_.pushBegan(owner, steadySeconds());
}

void ModelPushes::ask(Connection& connection, FrameHeader header, std::uint16_t flags) const {
  header.kind = FrameKind::kAsk;
  header.flags = flags;
  header.argument = read_[header.slice];
  connection.send(Connection::kAtOnce, header, {});
}

// The payload of the next push of a slice under way.
Payload ModelPushes::gradientOf(SliceIndex slice) {
  Payload gradient = payloadOf(slices_[slice].tensor);
  if (std::exchange(underWay_[slice]->isRepeated, true)) {
    return Payload::copyOf(std::span(gradient.data(), gradient.sizeBytes));
  }
  return gradient;
}

std::uint64_t ModelPushes::urgencyOf(SliceIndex slice) const {
  return settings_.ordered ? std::uint64_t{slice} + 1 : 1;
}

ByteCount ModelPushes::admitted(ServerId server, const FrameHeader& header) {
  Connection* const owner = connections_.find(server);
  const auto& underWay = underWay_[header.slice];
  if (owner == nullptr || !underWay || !underWay->done || underWay->round != header.round ||
      underWay->server != server) {
    return 0; // another server has been asked meanwhile
  }
  FrameHeader push = header;
  push.kind = FrameKind::kPush;
  push.map = registration_.map();
  Connection* to = owner;
  if ((header.flags & kFrameFlagGroup) != 0) { // by way of a helper
    auto group = GroupArgument::of(header);
    to = connections_.find(std::exchange(group.server, server));
    push.argument = group.packed();
  }
  if (to == nullptr) { // the helper is not connected yet, or lost
    ask(*owner, push, kFrameFlagDirect);
    return 0;
  }
  to->send(urgencyOf(header.slice), push, gradientOf(header.slice));
  return to == owner ? 0 : static_cast<ByteCount>(slices_[header.slice].tensor.nbytes());
}

std::optional<ModelPushes::Expected>
ModelPushes::take(ServerId server, const FrameHeader& header, const Payload& payload) {
  const SliceIndex slice = header.slice;
  Expected expected{slices_[slice].tensor, nullptr};
  const bool isPulled = header.round == 0;
  checkFits(payload, expected.tensor, /*mayBeEmpty=*/isPulled); // pulled too early
  steps_ = header.argument;
  read_[slice] = header.argument;
  auto& underWay = underWay_[slice];
  if (underWay && underWay->done && underWay->round == header.round) {
    expected.done = std::exchange(underWay->done, nullptr);
    // That server may differ from `server`, which may have got the push passed on.
    connections_.pushEnded(underWay->server, steadySeconds());
    connections_.answerCame(server, static_cast<ByteCount>(payload.sizeBytes));
    if ((header.flags & kFrameFlagLate) != 0) {
      expected.droppedBytes = static_cast<ByteCount>(expected.tensor.nbytes());
    }
    return expected;
  }
  if (!isPulled || !pull_ || pull_->part != header.map || pull_->isTaken[slice]) {
    return std::nullopt;
  }
  pull_->isTaken[slice] = true;
  return expected;
}

void ModelPushes::finish(SliceIndex slice, bool wasPush, const std::exception_ptr& error) {
  if (wasPush) {
    underWay_[slice].reset();
  } else if (pull_) {
    pull_->arrived.push_back(slice);
    pull_->error = error ? error : pull_->error;
  }
}

// ---------------------------------------------------------------------------------- lost servers

void ModelPushes::serverLost() {
  mayHaveLost_ = true;
  repeatLost(); // the new map may have come before the loss was noticed
}

// Repeats pushes and requests that a lost server had, or was to receive from other servers, until a
// map names no lost server. Servers apply only one of two equal pushes.
void ModelPushes::repeatLost() {
  const bool namesLost = std::ranges::any_of(registration_.places(), [&](const SliceOwners& place) {
    return connections_.isLost(place.owner) || connections_.isLost(place.replica);
  });
  const bool mayHaveLost = std::exchange(mayHaveLost_, namesLost) || namesLost;
  if (!mayHaveLost && !asksFirst()) { // requests do not move with their slice
    return;
  }
  for (SliceIndex slice = 0; slice < slices_.size(); ++slice) {
    if (mayHaveLost && pull_ && !pull_->isTaken[slice]) {
      requestPart(slice);
    }
    if (underWay_[slice] && underWay_[slice]->done) {
      push(slice);
    } else if (mayHaveLost && rounds_[slice] > 0) {
      markOver(slice);
    }
  }
}

// Tells the owner that this round is over: a replica may have missed its end. The answer is
// ignored.
void ModelPushes::markOver(SliceIndex slice) const {
  if (Connection* const owner = connections_.find(registration_.places()[slice].owner)) {
    FrameHeader header = registration_.about(FrameKind::kPull, slice);
    header.round = rounds_[slice];
    header.argument = PullArgument{kValuePart}.packed();
    owner->send(std::uint64_t{slice} + 1, header, {});
  }
}

bool ModelPushes::waits() const {
  return pull_ ||
      std::ranges::any_of(underWay_, [](const auto& slice) { return slice && slice->done; });
}

std::optional<SliceOwners> ModelPushes::lostForGood() const {
  for (SliceIndex slice = 0; slice < slices_.size(); ++slice) {
    const SliceOwners& place = registration_.places()[slice];
    if (underWay_[slice] && underWay_[slice]->done && connections_.isLost(place)) {
      return place;
    }
  }
  return std::nullopt;
}

std::vector<std::string> ModelPushes::namesUnderWay() const {
  std::vector<std::string> names;
  for (SliceIndex slice = 0; slice < slices_.size(); ++slice) {
    if (underWay_[slice]) {
      names.push_back(
          concat("'", slices_[slice].name, "' (server ", underWay_[slice]->server, ")"));
    }
  }
  return names;
}

std::vector<Transport::Done> ModelPushes::takeAll() {
  std::vector<Done> taken;
  for (auto& underWay : underWay_) {
    if (underWay && underWay->done) {
      taken.push_back(std::move(underWay->done));
    }
    underWay.reset();
  }
  return taken;
}

// ------------------------------------------------------------------------------------------ pulls

std::shared_ptr<const ModelPushes::PullProgress> ModelPushes::beginPull(std::uint32_t part) {
  if (pull_ || pulledInVain_) {
    throw InvalidUsage(concat(
        "model ", registration_.model(), " cannot be fetched from the servers: ",
        pull_ ? "another thread does so already"
              : "that has failed before, and late answers could be taken for new ones"));
  }
  pull_ = std::make_shared<PullProgress>(
      PullProgress{part, std::vector<bool>(slices_.size(), false), {}, nullptr});
  return pull_;
}

void ModelPushes::requestAll() {
  for (SliceIndex slice = 0; slice < slices_.size(); ++slice) {
    if (const ServerId owner = registration_.places()[slice].owner; !connections_.isLost(owner)) {
      connections_.at(owner); // throws if there is none
    }
    requestPart(slice);
  }
}

void ModelPushes::endPull(const std::shared_ptr<const PullProgress>& pull) {
  if (pull_ == pull) {
    pulledInVain_ = !pull->isWhole();
    pull_ = nullptr;
  }
}

// Asks for a slice of the pull. If its owner is lost, the replica is asked once a map names it.
void ModelPushes::requestPart(SliceIndex slice) {
  const SliceOwners& place = registration_.places()[slice];
  if (connections_.isLost(place)) {
    pull_->error = std::make_exception_ptr(connections_.lossOf(place, settings_.rank));
  } else if (Connection* const owner = connections_.find(place.owner)) {
    FrameHeader header = registration_.about(FrameKind::kPull, slice);
    header.argument = PullArgument{pull_->part}.packed();
    owner->send(std::uint64_t{slice} + 1, header, {});
  }
}

} // namespace hvd_order
