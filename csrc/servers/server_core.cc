#include "servers/server_core.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "servers/wire/arguments.h"

// The frame dispatcher of a parameter server: peers, frames, and which models there are.
//
// A frame is handled to its end on the thread of the connection that brought it. This file only
// chooses the object that handles the frame: a slice (served_slice.h), a model (served_model.h),
// the sums of tensors without a model (tensor_sums.h), or the helper's groups (aggregator.h).
// Nothing waits; a frame that cannot take effect yet is stored, and later frames continue the
// work.
//
// Invariant: a frame either takes effect or is refused with a FrameError and a line in the log. A
// refused frame does not end its connection, because header and payload were read completely, so
// the next frame starts at a known place.
//
// Two situations need special care. Servers learn of a model at different times, so frames of a
// server about a model or layout that is unknown here are kept until a worker registers a model.
// And a server that was suspended may have been given up by the other processes: when it sees a
// loss, it first asks `wasAway`, and if so retires instead of reporting the others as lost.
namespace hvd_order {

namespace {

// Most frames kept about models that are not registered yet.
constexpr std::size_t kMostEarly = 65536;

std::string textOf(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.sizeBytes};
}

void requireKind(Peer from, PeerKind kind) {
  if (from.kind != kind) {
    throw FrameError("such a frame comes from others");
  }
}

} // namespace

ServerCore::ServerCore(ServerOptions options)
    : room_(std::move(options)),
      sums_(room_.options.workers),
      aggregator_(room_.options, room_.peers) {}

ServerCore::~ServerCore() {
  stop();
}

// ---------------------------------------------------------------------------------------- peers

void ServerCore::connect(Peer peer, const std::shared_ptr<Connection>& connection) {
  room_.peers.add(peer, connection);
  const std::weak_ptr<ServerCore> weak = weak_from_this();
  connection->start(
      [weak, peer](const FrameHeader& header, Payload payload) {
        if (const auto self = weak.lock()) {
          self->onFrame(peer, header, std::move(payload));
        }
      },
      [weak, peer](const std::string& why) {
        if (const auto self = weak.lock()) {
          self->lost(peer, why);
        }
      });
  if (peer.kind == PeerKind::kServer) {
    for (const auto& model : allModels()) {
      model->peersChanged();
    }
  }
}

void ServerCore::sendControl(Peer peer, const std::string& text) {
  room_.peers.send(peer, Connection::kAtOnce, {.kind = FrameKind::kControl}, Payload::copyOf(text));
}

void ServerCore::lost(Peer peer, const std::string& why) {
  const bool hasAnnounced = room_.peers.remove(peer);
  // If the other processes have given this server up, it must not report their leaving as a loss:
  // it would tell workers so, or answer them without the copy that has already taken over.
  const auto& wasAway = room_.options.wasAway;
  if (!hasAnnounced && peer.kind != PeerKind::kObserver && wasAway && wasAway()) {
    retired_ = true;
  }
  if (peer.kind == PeerKind::kWorker && !hasAnnounced && !retired_) {
    failWorkers(concat(
        "rank ", peer.number,
        " is gone: its process died or its network connection "
        "broke (seen by server ",
        room_.options.server, ": ", why, ")"));
  }
  if (peer.kind == PeerKind::kServer && !retired_) {
    room_.routes.gone(static_cast<ServerId>(peer.number));
    aggregator_.ownerGone(static_cast<ServerId>(peer.number));
    for (const auto& model : allModels()) {
      model->serverGone(static_cast<ServerId>(peer.number));
    }
  }
  if (room_.options.onGone) {
    room_.options.onGone(peer, hasAnnounced ? std::string() : why);
  }
}

// A text in the payload means that the worker cannot continue; then no other worker can.
void ServerCore::left(Peer from, const Payload& payload) {
  room_.peers.announceLeave(from);
  if (from.kind == PeerKind::kWorker && payload.sizeBytes > 0) {
    failWorkers(textOf(payload));
  }
}

void ServerCore::failWorkers(const std::string& text) {
  hasFailed_ = true;
  const Payload payload = Payload::copyOf(text);
  for (const Peer worker : room_.peers.all(PeerKind::kWorker)) {
    room_.peers.send(worker, Connection::kAtOnce, {.kind = FrameKind::kLost}, payload);
  }
}

// Worker 0 counts a server as lost that may still be running: no process may accept its frames
// from now on.
void ServerCore::giveUp(Peer from, const FrameHeader& header, const Payload& payload) {
  if (from != Peer{PeerKind::kWorker, 0}) {
    throw FrameError("servers are given up by worker 0");
  }
  if (header.argument >= kNoServer || header.argument == room_.options.server) {
    throw FrameError(concat("no server ", header.argument, " to give up"));
  }
  const auto server = static_cast<int>(header.argument);
  // Sent ahead of the map without this server, which comes over the same connection.
  for (const Peer worker : room_.peers.all(PeerKind::kWorker)) {
    if (worker != from) {
      room_.peers.send(
          worker, Connection::kAtOnce, {.kind = FrameKind::kGone, .argument = header.argument},
          payload);
    }
  }
  room_.peers.breakOff({PeerKind::kServer, server}, textOf(payload));
}

void ServerCore::stop() noexcept {
  room_.peers.stop();
}

// --------------------------------------------------------------------------------------- frames

void ServerCore::onFrame(Peer from, const FrameHeader& header, Payload payload) {
  if (retired_) {
    return;
  }
  try {
    if (from.kind == PeerKind::kServer && isEarly(from, header, payload)) {
      return;
    }
    handle(from, header, std::move(payload));
  } catch (const Error& error) {
    // Header and payload were read completely, so the next frame can be read: only this one is
    // refused.
    if (room_.options.log) {
      room_.options.log(concat("refused a frame of ", nameOf(from), ": ", error.what()));
    }
  }
}

void ServerCore::handle(Peer from, const FrameHeader& header, Payload payload) {
  switch (header.kind) {
    case FrameKind::kControl:
      if (room_.options.onControl) {
        room_.options.onControl(from, textOf(payload));
      }
      return;
    case FrameKind::kModel:
      requireKind(from, PeerKind::kWorker);
      registerModel(from, header, payload);
      return takeEarly();
    case FrameKind::kLate:
      return sendLateWorkers(from);
    case FrameKind::kValue:
      if (from.kind != PeerKind::kServer || (header.flags & kFrameFlagGroup) == 0) {
        throw FrameError("such a frame is for workers");
      }
      return aggregator_.passOn(static_cast<ServerId>(from.number), header, payload);
    case FrameKind::kLeave:
      return left(from, payload);
    case FrameKind::kGone:
      return giveUp(from, header, payload);
    case FrameKind::kPush:
      if (header.model == kNoModel) {
        return sumTensor(from, header, std::move(payload));
      }
      [[fallthrough]];
    default:
      return handleOfModel(from, header, std::move(payload));
  }
}

void ServerCore::handleOfModel(Peer from, const FrameHeader& header, Payload payload) {
  switch (header.kind) {
    case FrameKind::kMap:
      requireKind(from, PeerKind::kWorker);
      return modelOf(header)->setMap(from, header, payload);
    case FrameKind::kRule:
      if (from != Peer{PeerKind::kWorker, 0}) {
        throw FrameError("rules come from worker 0");
      }
      return modelOf(header)->setRules(header, payload);
    case FrameKind::kSwitch:
      requireKind(from, PeerKind::kWorker);
      return modelOf(header)->switched(from.number, header.map);
    case FrameKind::kAsk:
      requireKind(from, PeerKind::kWorker);
      return modelOf(header)->slice(header.slice).ask(from.number, header);
    case FrameKind::kPush: {
      if ((header.flags & kFrameFlagGroup) != 0) {
        return handleOfGroup(from, header, std::move(payload));
      }
      const int worker = workerOf(from, header);
      return modelOf(header)->slice(header.slice).push(from, worker, header, std::move(payload));
    }
    case FrameKind::kPull: {
      const int worker = workerOf(from, header);
      return modelOf(header)->slice(header.slice).pull(from, worker, header);
    }
    case FrameKind::kState:
      return modelOf(header)->slice(header.slice).stateCame(from, header, std::move(payload));
    case FrameKind::kReplica:
      requireKind(from, PeerKind::kServer);
      return modelOf(header)->slice(header.slice).copyCame(from, header, std::move(payload));
    case FrameKind::kReplicaDone:
      requireKind(from, PeerKind::kServer);
      return modelOf(header)->slice(header.slice).copyArrived(from, header);
    default:
      throw FrameError("such a frame is for workers");
  }
}

// For groups: workers push to the helper, and the helper sends the sum to the owner.
void ServerCore::handleOfGroup(Peer from, const FrameHeader& header, Payload payload) {
  const auto model = modelOf(header);
  ServedSlice& slice = model->slice(header.slice);
  if (from.kind == PeerKind::kServer) {
    return slice.groupCame(from, header, payload);
  }
  const SliceShape& shape = model->registration.slices[header.slice];
  aggregator_.add(workerOf(from, header), header, std::move(payload), shape);
}

// Servers learn of a model at different times, so one may send frames about it before the other
// knows it.
bool ServerCore::isEarly(Peer from, const FrameHeader& header, const Payload& payload) {
  if (header.kind != FrameKind::kState && header.kind != FrameKind::kReplica &&
      header.kind != FrameKind::kReplicaDone && header.kind != FrameKind::kPush &&
      header.kind != FrameKind::kPull) {
    return false;
  }
  const std::unique_lock lock(modelsMutex_);
  const auto newest = std::find_if(models_.rbegin(), models_.rend(), [&](const auto& entry) {
    return entry.first.first == header.model;
  });
  if (newest != models_.rend() && newest->first.second >= header.layout) {
    return false;
  }
  if (earlyFrames_.size() >= kMostEarly) {
    throw FrameError("too many frames about models that no worker has announced");
  }
  earlyFrames_.push_back({from, header, payload});
  return true;
}

void ServerCore::takeEarly() {
  std::vector<EarlyFrame> frames;
  {
    const std::unique_lock lock(modelsMutex_);
    frames = std::exchange(earlyFrames_, {});
  }
  for (EarlyFrame& frame : frames) {
    onFrame(frame.from, frame.header, std::move(frame.payload));
  }
}

// The worker whose push it is: a server may pass on a push that came to it too late.
int ServerCore::workerOf(Peer from, const FrameHeader& header) const {
  std::uint32_t worker = static_cast<std::uint32_t>(from.number);
  if (from.kind == PeerKind::kServer) {
    worker = header.kind == FrameKind::kPull ? PullArgument::of(header).worker
                                             : PassedPushArgument::of(header).worker;
  }
  if (from.kind == PeerKind::kObserver ||
      worker >= static_cast<std::uint32_t>(room_.options.workers)) {
    throw FrameError("only workers push and pull");
  }
  return static_cast<int>(worker);
}

// --------------------------------------------------------------------------------------- models

std::shared_ptr<ServedModel> ServerCore::modelOf(const FrameHeader& header) const {
  const std::shared_lock lock(modelsMutex_);
  const auto found = models_.find({header.model, header.layout});
  if (found == models_.end()) {
    throw FrameError(concat("model ", header.model, " has no layout ", header.layout, " here"));
  }
  return found->second;
}

std::vector<std::shared_ptr<ServedModel>> ServerCore::allModels() const {
  const std::shared_lock lock(modelsMutex_);
  std::vector<std::shared_ptr<ServedModel>> models;
  models.reserve(models_.size());
  for (const auto& [key, model] : models_) {
    models.push_back(model);
  }
  return models;
}

void ServerCore::registerModel(Peer from, const FrameHeader& header, const Payload& payload) {
  Registration registration =
      readRegistration({payload.data(), payload.sizeBytes}, room_.options.largestSlice);
  std::vector<std::shared_ptr<ServedModel>> retired;
  {
    const std::unique_lock lock(modelsMutex_);
    const ModelKey key{header.model, header.layout};
    const auto found = models_.find(key);
    if (found == models_.end()) {
      models_.emplace(
          key,
          std::make_shared<ServedModel>(
              room_, header.model, header.layout, std::move(registration)));
    } else if (!(found->second->registration == registration)) {
      throw FrameError(concat("another model ", header.model, " than other workers have"));
    }
    auto& registered = registered_[key];
    registered.insert(from.number);
    // A new layout of a model replaces the older ones once all workers have registered it.
    if (registered.size() == static_cast<std::size_t>(room_.options.workers)) {
      const auto isOlder = [&](const auto& entry) {
        return entry.first.first == header.model && entry.first.second < header.layout;
      };
      for (const auto& entry : models_) {
        if (isOlder(entry)) {
          retired.push_back(entry.second);
        }
      }
      std::erase_if(models_, isOlder);
      std::erase_if(registered_, isOlder);
    }
  }
  for (const auto& model : retired) {
    model->retire();
    aggregator_.retire(model->id, model->layout);
  }
}

// ------------------------------------------------------------------------------------- the rest

void ServerCore::sumTensor(Peer from, const FrameHeader& header, Payload payload) {
  requireKind(from, PeerKind::kWorker);
  const auto sum = sums_.add(from.number, header.argument, header.layout, std::move(payload));
  if (!sum) {
    return;
  }
  for (int worker = 0; worker < room_.options.workers; ++worker) {
    room_.peers.send(
        {PeerKind::kWorker, worker}, 1,
        {.kind = FrameKind::kValue,
         .model = kNoModel,
         .layout = header.layout,
         .argument = header.argument},
        *sum);
  }
}

std::vector<ServerCore::AuditedSlice> ServerCore::audit() const {
  std::vector<AuditedSlice> audited;
  for (const auto& model : allModels()) {
    for (SliceIndex index = 0; index < model->slices().size(); ++index) {
      if (const auto report = model->slices()[index]->report()) {
        const Payload& value = report->value;
        audited.push_back(
            {model->id, model->layout, index, report->owned, report->version,
             value ? crc32c({value.data(), value.sizeBytes}) : 0});
      }
    }
  }
  return audited;
}

std::set<int> ServerCore::lateWorkers() const {
  std::set<int> late;
  for (const auto& model : allModels()) {
    for (const auto& slice : model->slices()) {
      const std::vector<int> missing = slice->missing();
      late.insert(missing.begin(), missing.end());
    }
  }
  return late;
}

void ServerCore::sendLateWorkers(Peer to) {
  ByteWriter ranks;
  for (const int worker : lateWorkers()) {
    ranks.put(static_cast<std::uint32_t>(worker));
  }
  room_.peers.send(
      to, Connection::kAtOnce, {.kind = FrameKind::kLate}, Payload::copyOf(ranks.bytes()));
}

} // namespace hvd_order
