#include "servers/c10d/server_transport.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/scope_exit.h"
#include "servers/c10d/tensor_payload.h"
#include "servers/wire/recording.h"
#include "torch/packing/element_type.h"

// The worker's side of parameter servers: one lock, the frames that come, and failures.
//
// Its parts, all under that lock: the connections and their observed work (server_connections.h),
// and each model's registration, map, pushes and pulls (model_pushes.h).
//
// An answer is written to its place without the lock. That is safe because what it is for has been
// taken out before: no other answer is accepted for the slice, and the engine does not use the
// buffer before `done` is called. Functions of the engine, of Python and of a connection's end are
// called without the lock as well.
//
// The loss of a server fails the transport only if a slice under way has neither owner nor replica
// left, or no server is left. After a failure every waiting slice gets the same error, and later
// calls of `issue` raise it.
namespace hvd_order {

namespace {

constexpr std::size_t kMostNamed = 5; // slices in a message

std::string textOf(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.sizeBytes};
}

// FNV-1a: the same on every worker.
std::uint64_t hashOf(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

// The segments of a slice that are parameters.
std::vector<Segment> segmentsOf(
    const SliceLayout& layout,
    SliceIndex index,
    std::size_t element,
    const std::vector<ServerTransport::ServedParameter>& parameters) {
  const Slice& slice = layout.slices()[index];
  std::vector<Segment> segments;
  for (const TensorId tensor : layout.tensorsOf(index)) {
    const ByteCount begin = layout.tensorOffset(tensor);
    const ByteCount end = begin + static_cast<ByteCount>(parameters.at(tensor).elements * element);
    const ByteCount first = std::max(begin, slice.offsetBytes);
    const ByteCount last = std::min(end, slice.offsetBytes + slice.sizeBytes);
    if (first < last) {
      segments.push_back(
          {static_cast<std::uint32_t>((first - slice.offsetBytes) / element),
           static_cast<std::uint32_t>((last - first) / element), parameters.at(tensor).group});
    }
  }
  return segments;
}

} // namespace

ServerTransport::ServerTransport(const PushSettings& settings, OnLost onLost, OnControl onControl)
    : settings_(settings), onLost_(std::move(onLost)), onControl_(std::move(onControl)) {}

ServerTransport::~ServerTransport() {
  close();
}

// -------------------------------------------------------------------------------------- servers

void ServerTransport::connect(ServerId server, std::shared_ptr<Connection> connection) {
  const std::weak_ptr<ServerTransport> weak = weak_from_this();
  const std::scoped_lock lock(mutex_);
  connections_.add(server, connection);
  connection->start(
      [weak, server](const FrameHeader& header, const Payload& payload) {
        if (const auto self = weak.lock()) {
          self->onFrame(server, header, payload);
        }
      },
      [weak, server](const std::string& why) {
        if (const auto self = weak.lock()) {
          self->lost(server, why);
        }
      });
  for (const auto& [id, model] : models_) {
    model.registration().sendTo(*connection);
  }
}

std::vector<ServerId> ServerTransport::servers() const {
  const std::scoped_lock lock(mutex_);
  return connections_.servers();
}

void ServerTransport::sendControl(ServerId server, const std::string& text) {
  const std::scoped_lock lock(mutex_);
  if (Connection* const connection = connections_.find(server)) {
    connection->send(Connection::kAtOnce, {.kind = FrameKind::kControl}, Payload::copyOf(text));
  }
}

std::map<ServerId, std::uint64_t> ServerTransport::framesFrom() const {
  const std::scoped_lock lock(mutex_);
  return connections_.framesFrom();
}

bool ServerTransport::waits() const {
  const std::scoped_lock lock(mutex_);
  return !sums_.empty() ||
      std::ranges::any_of(models_, [](const auto& model) { return model.second.waits(); });
}

std::vector<ServerTransport::Figures> ServerTransport::takeFigures() {
  const std::scoped_lock lock(mutex_);
  return connections_.takeFigures(steadySeconds());
}

ServerTransport::Updates ServerTransport::dropped() const {
  const std::scoped_lock lock(mutex_);
  return dropped_;
}

ServerTransport::Updates ServerTransport::aggregated() const {
  const std::scoped_lock lock(mutex_);
  return aggregated_;
}

// --------------------------------------------------------------------------------------- models

void ServerTransport::prepare(
    ModelId model,
    std::vector<SliceOwners> places,
    std::vector<ServedParameter> parameters) {
  const std::scoped_lock lock(mutex_);
  prepared_[model] = {std::move(places), std::move(parameters)};
}

void ServerTransport::setBuffers(
    ModelId model,
    const std::vector<at::Tensor>& buffers,
    const SliceLayout& layout) {
  const at::NoGradGuard noGrad;
  const std::scoped_lock lock(mutex_);
  auto prepared = prepared_.extract(model);
  if (prepared.empty() || prepared.mapped().places.size() != layout.slices().size()) {
    throw InvalidUsage(concat("no places for the slices of model ", model));
  }
  const std::vector<ServedParameter>& parameters = prepared.mapped().parameters;
  Registration registration{.serversUpdate = !parameters.empty(), .slices = {}};
  std::vector<ModelPushes::SliceView> slices;
  for (SliceIndex index = 0; index < layout.slices().size(); ++index) {
    const Slice& slice = layout.slices()[index];
    const at::Tensor& buffer = buffers.at(slice.buffer);
    const ElementType type = elementTypeOf(buffer);
    const std::size_t element = sizeOf(type);
    slices.push_back(
        {buffer.narrow(
             0, slice.offsetBytes / static_cast<ByteCount>(element),
             slice.sizeBytes / static_cast<ByteCount>(element)),
         layout.sliceName(index)});
    SliceShape shape{static_cast<std::uint32_t>(slice.sizeBytes), type, {}};
    if (!parameters.empty()) {
      shape.segments = segmentsOf(layout, index, element, parameters);
    }
    registration.slices.push_back(std::move(shape));
  }
  ModelRegistration registered(
      model, layouts_++, std::move(registration), std::move(prepared.mapped().places));
  for (const ServerId server : connections_.servers()) {
    registered.sendTo(connections_.at(server));
  }
  models_.erase(model);
  models_.try_emplace(model, settings_, connections_, std::move(registered), std::move(slices));
}

void ServerTransport::removeBuffers(ModelId model) {
  const std::scoped_lock lock(mutex_);
  models_.erase(model);
}

void ServerTransport::beginWithBuffers(
    ModelId model,
    std::uint32_t part,
    std::uint32_t parts,
    std::uint64_t stepsBefore) {
  const std::scoped_lock lock(mutex_);
  models_.at(model).sendState(part, parts, stepsBefore);
}

void ServerTransport::setRules(ModelId model, const std::vector<UpdateRule>& rules) {
  const std::scoped_lock lock(mutex_);
  models_.at(model).setRules(rules);
}

void ServerTransport::setMap(ModelId model, std::vector<SliceOwners> places) {
  const std::scoped_lock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end()) {
    return; // the model has been dropped meanwhile
  }
  const ModelRegistration& registered = found->second.registration();
  if (places.size() != registered.places().size()) {
    throw InvalidUsage(
        concat(places.size(), " places for ", registered.places().size(), " slices"));
  }
  found->second.adopt(registered.map() + 1, std::move(places));
  changed_.notify_all(); // a pull may have failed
}

std::vector<SliceOwners> ServerTransport::places(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  return models_.at(model).registration().places();
}

std::uint64_t ServerTransport::steps(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  return models_.at(model).steps();
}

std::vector<SliceIndex>
ServerTransport::pull(ModelId id, std::uint32_t part, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  ModelPushes& model = models_.at(id);
  const auto pull = model.beginPull(part);
  const ScopeExit end([&] {              // however this call ends; under the lock
    const auto found = models_.find(id); // the layout may have been replaced meanwhile
    if (found != models_.end()) {
      found->second.endPull(pull);
    }
  });
  model.requestAll();
  changed_.wait_for(lock, timeout, [&] { return error_ || pull->error || pull->isWhole(); });
  if (const std::exception_ptr error = error_ ? error_ : pull->error) {
    std::rethrow_exception(error);
  }
  if (!pull->isWhole()) {
    throw TransferTimeout(concat(
        pull->arrived.size(), " of ", pull->isTaken.size(), " slices came from the servers in ",
        std::chrono::duration<double>(timeout).count(), " s"));
  }
  return pull->arrived; // a copy: `end` looks at it
}

// ------------------------------------------------------------------------------ pushes and sums

void ServerTransport::issue(SliceKey key, const Slice& /*slice*/, Done done) {
  const std::scoped_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  models_.at(key.model).begin(key.index, std::move(done));
}

void ServerTransport::begin(Sum sum) {
  const std::uint64_t hash = hashOf(sum.name);
  const std::scoped_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  const std::vector<ServerId> servers = connections_.servers();
  HVDO_CHECK(!servers.empty() && !sums_.contains(hash), "two tensors are called ", sum.name);
  const FrameHeader header{
      .kind = FrameKind::kPush,
      .model = kNoModel,
      .layout = static_cast<std::uint32_t>(elementTypeOf(sum.tensor)),
      .argument = hash};
  Payload payload = payloadOf(sum.tensor);
  // Servers take turns; all workers sum the same tensors in the same order.
  const ServerId server = servers[sumsBegun_++ % servers.size()];
  connections_.at(server).send(1, header, std::move(payload));
  sums_.emplace(hash, NamedSum{sum.tensor, std::move(sum.done), server}); // answers need the lock
}

void ServerTransport::onFrame(ServerId server, const FrameHeader& header, const Payload& payload) {
  {
    const std::scoped_lock lock(mutex_);
    connections_.frameCame(server);
  }
  switch (header.kind) {
    case FrameKind::kValue:
      return answered(server, header, payload);
    case FrameKind::kAdmit:
      return admitted(server, header);
    case FrameKind::kMap:
      return mapCame(server, header, payload);
    case FrameKind::kLost:
      return fail(std::make_exception_ptr(ServerLost(textOf(payload))));
    case FrameKind::kGone:
      return giveUp({static_cast<ServerId>(header.argument)}, textOf(payload));
    case FrameKind::kLate:
      return lateCame(server, payload);
    case FrameKind::kControl:
      return onControl_(server, textOf(payload));
    default:
      throw FrameError("such a frame is for servers");
  }
}

// The model of a frame about a slice; null if its layout has been replaced.
ModelPushes* ServerTransport::find(const FrameHeader& header) {
  const auto found = models_.find(header.model);
  return found != models_.end() && found->second.isAbout(header) ? &found->second : nullptr;
}

void ServerTransport::admitted(ServerId server, const FrameHeader& header) {
  const std::scoped_lock lock(mutex_);
  ModelPushes* const model = find(header);
  const ByteCount bytes = model == nullptr ? 0 : model->admitted(server, header);
  aggregated_.slices += bytes > 0 ? 1 : 0;
  aggregated_.bytes += bytes;
}

void ServerTransport::mapCame(ServerId server, const FrameHeader& header, const Payload& payload) {
  auto places = readOwners({payload.data(), payload.sizeBytes});
  const std::scoped_lock lock(mutex_);
  const auto found = models_.find(header.model);
  Connection* const connection = connections_.find(server);
  if (found != models_.end() && found->second.registration().layout() == header.layout &&
      found->second.registration().places().size() == places.size()) {
    found->second.adopt(header.map, std::move(places));
    changed_.notify_all(); // a pull may have failed
  } else if (header.layout < layouts_ && connection != nullptr) {
    // Workers drop a model at different times: this one sends no more frames about it.
    connection->send(
        Connection::kLast,
        {.kind = FrameKind::kSwitch,
         .model = header.model,
         .layout = header.layout,
         .map = header.map},
        {});
  }
}

void ServerTransport::answered(ServerId server, const FrameHeader& header, const Payload& payload) {
  std::optional<ModelPushes::Expected> expected;
  {
    const std::scoped_lock lock(mutex_);
    expected = take(server, header, payload);
  }
  if (!expected) {
    return;
  }
  std::exception_ptr error;
  try {
    fill(expected->tensor, payload); // no other thread uses the tensor until the slice is done
  } catch (...) {
    error = std::current_exception(); // a device's, and the gradient may be gone
  }
  if (header.model != kNoModel) {
    const std::scoped_lock lock(mutex_);
    if (ModelPushes* const model = find(header)) {
      model->finish(header.slice, /*wasPush=*/expected->done != nullptr, error);
      changed_.notify_all();
    }
  }
  if (expected->done) {
    expected->done(error);
  }
}

std::optional<ModelPushes::Expected>
ServerTransport::take(ServerId server, const FrameHeader& header, const Payload& payload) {
  if (header.model != kNoModel) {
    ModelPushes* const model = find(header);
    if (model == nullptr) {
      return std::nullopt;
    }
    auto expected = model->take(server, header, payload);
    const ByteCount dropped = expected ? expected->droppedBytes : 0;
    dropped_.slices += dropped > 0 ? 1 : 0;
    dropped_.bytes += dropped;
    return expected;
  }
  const auto found = sums_.find(header.argument);
  if (found == sums_.end()) {
    return std::nullopt;
  }
  checkFits(payload, found->second.tensor, /*mayBeEmpty=*/false);
  NamedSum sum = std::move(sums_.extract(found).mapped());
  return ModelPushes::Expected{std::move(sum.tensor), std::move(sum.done)};
}

// ------------------------------------------------------------------------------------- failures

void ServerTransport::giveUp(const std::vector<ServerId>& servers, const std::string& why) {
  std::vector<std::shared_ptr<Connection>> connections;
  std::exception_ptr error;
  {
    const std::scoped_lock lock(mutex_);
    for (const ServerId server : servers) {
      if (connections_.find(server) != nullptr) {
        connections.push_back(connections_.lose(server, why));
      }
    }
    if (connections.empty()) {
      return;
    }
    for (const ServerId server : servers) {
      if (settings_.rank == 0) {
        connections_.sendToAll(
            Connection::kAtOnce, {.kind = FrameKind::kGone, .argument = server},
            Payload::copyOf(why));
      }
    }
    // Checked before a new map is made: no process has the state of a slice whose owner and
    // replica are lost.
    error = errorOfLoss();
  }
  if (error) {
    fail(error);
  }
  for (const auto& connection : connections) {
    connection->breakOff(why); // the connection's thread then calls `lost`
  }
}

void ServerTransport::lost(ServerId server, const std::string& why) {
  std::exception_ptr error;
  std::vector<Done> sums;
  {
    const std::scoped_lock lock(mutex_);
    connections_.lose(server, why);
    try {
      for (auto& [id, model] : models_) {
        model.serverLost();
      }
      error = errorOfLoss();
      if (!error && connections_.servers().empty()) {
        error = std::make_exception_ptr(connections_.lossOf({server, kNoServer}, settings_.rank));
      }
    } catch (...) { // nobody above this thread could report it
      error = std::current_exception();
    }
    sums = takeSumsOf(server);
    changed_.notify_all(); // a pull may have failed
  }
  if (error) {
    fail(error);
  }
  for (const Done& done : sums) {
    done(
        std::make_exception_ptr(ServerLost(
            concat("server ", server, " is gone, and with it a sum that it made: ", why))));
  }
  onLost_(server, why);
}

// Tensors that this server was to sum. The other workers have sent theirs to it as well, so no
// other server can.
std::vector<Transport::Done> ServerTransport::takeSumsOf(ServerId server) {
  std::vector<Done> taken;
  std::erase_if(sums_, [&](auto& sum) {
    const bool isIts = sum.second.server == server;
    if (isIts) {
      taken.push_back(std::move(sum.second.done));
    }
    return isIts;
  });
  return taken;
}

// The error if the state of a slice under way is lost.
std::exception_ptr ServerTransport::errorOfLoss() const {
  for (const auto& [id, model] : models_) {
    if (const auto place = model.lostForGood()) {
      return std::make_exception_ptr(connections_.lossOf(*place, settings_.rank));
    }
  }
  return nullptr;
}

void ServerTransport::fail(const std::exception_ptr& error) {
  std::vector<Done> waiting;
  {
    const std::scoped_lock lock(mutex_);
    if (!error_) {
      error_ = error;
    }
    for (auto& [id, model] : models_) {
      std::ranges::move(model.takeAll(), std::back_inserter(waiting));
    }
    for (auto& [name, sum] : std::exchange(sums_, {})) {
      waiting.push_back(std::move(sum.done));
    }
    changed_.notify_all();
  }
  for (const Done& done : waiting) {
    done(error_);
  }
}

void ServerTransport::inquire() {
  const std::scoped_lock lock(mutex_);
  late_.clear();
  for (const ServerId server : connections_.servers()) {
    silent_.insert(server);
  }
  connections_.sendToAll(Connection::kAtOnce, {.kind = FrameKind::kLate}, {});
}

void ServerTransport::lateCame(ServerId server, const Payload& payload) {
  const std::scoped_lock lock(mutex_);
  silent_.erase(server);
  ByteReader ranks({payload.data(), payload.sizeBytes});
  while (ranks.left() > 0) {
    late_.insert(static_cast<Rank>(ranks.get<std::uint32_t>()));
  }
}

std::string ServerTransport::report() const {
  const std::scoped_lock lock(mutex_);
  std::vector<std::string> waiting;
  for (const auto& [id, model] : models_) {
    std::ranges::move(model.namesUnderWay(), std::back_inserter(waiting));
  }
  std::string text = concat("rank ", settings_.rank, " waits for the servers' answers about ");
  for (std::size_t i = 0; i < std::min(kMostNamed, waiting.size()); ++i) {
    text += (i == 0 ? "" : ", ") + waiting[i];
  }
  if (waiting.size() > kMostNamed) {
    text += concat(" and ", waiting.size() - kMostNamed, " more");
  }
  const auto list = [&](const char* before, const auto& numbers, const char* after) {
    for (const auto number : numbers) {
      text += concat(number == *numbers.begin() ? before : ", ", number);
    }
    text += numbers.empty() ? "" : after;
  };
  list("; the gradients of ranks ", late_, " have not come to them");
  list("; no answer from servers ", silent_, "");
  if (late_.empty() && silent_.empty()) {
    text += "; every rank has sent its gradients, so a server or the network is stuck";
  }
  return text;
}

void ServerTransport::abort() noexcept {
  const std::string text = concat("rank ", settings_.rank, " has given up; its own error says why");
  {
    const std::scoped_lock lock(mutex_);
    // The other workers observe a lost rank or server, this transport's own error, by themselves.
    if (!error_) {
      connections_.sendToAll(
          Connection::kAtOnce, {.kind = FrameKind::kLeave}, Payload::copyOf(text));
    }
  }
  fail(std::make_exception_ptr(CollectiveError("the exchange with the servers was given up")));
}

void ServerTransport::close() noexcept {
  std::vector<std::shared_ptr<Connection>> connections;
  {
    const std::scoped_lock lock(mutex_);
    connections_.sendToAll(Connection::kLast, {.kind = FrameKind::kLeave}, {});
    connections = connections_.takeAll();
  }
  for (const auto& connection : connections) {
    connection->stop();
  }
  fail(std::make_exception_ptr(CollectiveError("the connection to the servers has been closed")));
}

} // namespace hvd_order
