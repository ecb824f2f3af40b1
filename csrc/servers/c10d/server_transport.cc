#include "servers/c10d/server_transport.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "servers/c10d/tensor_payload.h"
#include "servers/wire/arguments.h"

// The worker's side of parameter servers: connections, registration, maps and failures.
// server_pushes.cc has the pushes and their answers.
//
// A worker keeps, for every slice, the round of its last push and whether that push is under way.
// That suffices to repeat it: the gradient stays in the buffer until the slice is done, and
// servers recognise repeated pushes by worker and round. After a new map, `adopt` tells every
// server that this worker has switched, behind all pushes by the old map (kLast). served_slice.cc
// relies on that order.
//
// Invariant: while a map names a lost server, and once more with the map after that, every push
// under way is sent again, and the owner of every idle slice is told which round is over
// (`pushAgain`, `askAgain`). So a replica that takes over misses neither a push nor the end of a
// round.
//
// The loss of a server fails the transport only if a slice under way has neither owner nor replica
// left, or no server is left. After a failure every waiting slice gets the same error, and later
// calls of `issue` raise it.
namespace hvd_order {

namespace {

constexpr std::size_t kMostNamed = 5; // slices in a message

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The segments of a slice that are parameters.
std::vector<Segment> segmentsOf(
    const SliceLayout& layout,
    SliceIndex index,
    std::size_t element,
    const std::vector<ServerTransport::Parameter>& parameters) {
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

ServerTransport::ServerTransport(
    Rank rank,
    int workers,
    bool ordered,
    bool asksFirst,
    OnLost onLost,
    OnControl onControl)
    : rank_(rank),
      workers_(workers),
      ordered_(ordered),
      asksFirst_(asksFirst),
      onLost_(std::move(onLost)),
      onControl_(std::move(onControl)) {}

ServerTransport::~ServerTransport() {
  close();
}

// -------------------------------------------------------------------------------------- servers

void ServerTransport::connect(ServerId server, std::shared_ptr<Connection> connection) {
  const std::weak_ptr<ServerTransport> weak = weak_from_this();
  const std::scoped_lock lock(mutex_);
  const auto [line, isNew] = lines_.emplace(server, Line{connection});
  if (!isNew) {
    throw InvalidUsage(concat("server ", server, " is connected already"));
  }
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
  for (const auto& [model, registered] : models_) {
    tell(line->second, model, registered);
  }
}

std::vector<ServerId> ServerTransport::servers() const {
  const std::scoped_lock lock(mutex_);
  std::vector<ServerId> servers;
  for (const auto& [server, line] : lines_) {
    servers.push_back(server);
  }
  return servers;
}

void ServerTransport::sendControl(ServerId server, const std::string& text) {
  const std::scoped_lock lock(mutex_);
  if (const auto line = lines_.find(server); line != lines_.end()) {
    line->second.connection->send(
        Connection::kAtOnce, {.kind = FrameKind::kControl}, Payload::copyOf(text));
  }
}

// Sends a server everything that it needs about a model, before the first push.
void ServerTransport::tell(Line& line, ModelId model, const Registered& registered) {
  const FrameHeader about{.model = model, .layout = registered.layout, .map = registered.map};
  const auto say = [&](FrameKind kind, const std::vector<std::byte>& bytes) {
    FrameHeader header = about;
    header.kind = kind;
    line.connection->send(Connection::kAtOnce, header, Payload::copyOf(bytes));
  };
  say(FrameKind::kModel, writeRegistration(registered.registration));
  say(FrameKind::kMap, writePlacements(registered.places));
  for (const GivenRules& rules : registered.rules) {
    ServerTransport::say(line, model, registered, rules);
  }
}

void ServerTransport::say(
    Line& line,
    ModelId model,
    const Registered& registered,
    const GivenRules& rules) {
  line.connection->send(
      Connection::kAtOnce,
      {.kind = FrameKind::kRule,
       .model = model,
       .layout = registered.layout,
       .round = rules.since,
       .argument = rules.number},
      Payload::copyOf(rules.bytes));
}

ServerTransport::Line& ServerTransport::lineFor(ServerId server) {
  const auto line = lines_.find(server);
  HVDO_CHECK(line != lines_.end(), "no connection to server ", server);
  return line->second;
}

// --------------------------------------------------------------------------------------- models

void ServerTransport::prepare(
    ModelId model,
    std::vector<Placement> places,
    std::vector<Parameter> parameters) {
  const std::scoped_lock lock(mutex_);
  Registered prepared;
  prepared.places = std::move(places);
  prepared_[model] = std::move(prepared);
  parameters_[model] = std::move(parameters);
}

void ServerTransport::setBuffers(
    ModelId model,
    const std::vector<at::Tensor>& buffers,
    const SliceLayout& layout) {
  const at::NoGradGuard noGrad;
  const std::scoped_lock lock(mutex_);
  const auto prepared = prepared_.extract(model);
  if (prepared.empty() || prepared.mapped().places.size() != layout.slices().size()) {
    throw InvalidUsage(concat("no places for the slices of model ", model));
  }
  Registered registered = std::move(prepared.mapped());
  const auto parameters = std::move(parameters_.extract(model).mapped());
  registered.layout = layouts_++;
  registered.registration.serversUpdate = !parameters.empty();
  for (SliceIndex index = 0; index < layout.slices().size(); ++index) {
    const Slice& slice = layout.slices()[index];
    const at::Tensor& buffer = buffers.at(slice.buffer);
    const ElementType type = elementTypeOf(buffer);
    const std::size_t element = sizeOf(type);
    registered.views.push_back(buffer.narrow(
        0, slice.offsetBytes / static_cast<ByteCount>(element),
        slice.sizeBytes / static_cast<ByteCount>(element)));
    registered.names.push_back(layout.sliceName(index));
    SliceShape shape{static_cast<std::uint32_t>(slice.sizeBytes), type, {}};
    if (!parameters.empty()) {
      shape.segments = segmentsOf(layout, index, element, parameters);
    }
    registered.registration.slices.push_back(std::move(shape));
  }
  registered.firstPlaces = registered.places;
  registered.rounds.assign(layout.slices().size(), 0);
  registered.underWay.resize(layout.slices().size());
  registered.read.assign(layout.slices().size(), 0);
  for (auto& [server, line] : lines_) {
    tell(line, model, registered);
  }
  models_[model] = std::move(registered);
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
  const Registered& registered = models_.at(model);
  for (SliceIndex slice = 0; slice < registered.views.size(); ++slice) {
    const auto say = [&](std::uint32_t number, Payload payload) {
      lineFor(registered.firstPlaces[slice].owner) // one server gets all parts, despite any move
          .connection->send(
              Connection::kAtOnce,
              {.kind = FrameKind::kState,
               .model = model,
               .layout = registered.layout,
               .slice = slice,
               .argument = StateArgument{parts, number}.packed()},
              std::move(payload));
    };
    if (part == 1) {
      ByteWriter counters;
      counters.put(stepsBefore);
      for (int number = 0; number < 2 * workers_; ++number) { // rounds seen and skipped
        counters.put(Round{0});
      }
      say(0, Payload::copyOf(counters.bytes()));
    }
    const Payload values = payloadOf(registered.views[slice]);
    // A copy, because the buffers are written again before the send completes.
    say(part, Payload::copyOf(std::span(values.data(), values.sizeBytes)));
  }
}

void ServerTransport::setRules(ModelId model, const std::vector<UpdateRule>& rules) {
  const std::scoped_lock lock(mutex_);
  Registered& registered = models_.at(model);
  const Round next = *std::max_element(registered.rounds.begin(), registered.rounds.end()) + 1;
  const Round oldest = *std::min_element(registered.rounds.begin(), registered.rounds.end());
  registered.rules.push_back({++registered.rulesGiven, next, writeRules(rules)});
  // Keeps the rules that pushes under way may need, for new servers.
  while (registered.rules.size() > 1 && registered.rules[1].since <= oldest) {
    registered.rules.pop_front();
  }
  for (auto& [server, line] : lines_) {
    say(line, model, registered, registered.rules.back());
  }
}

void ServerTransport::setMap(ModelId model, std::vector<Placement> places) {
  const std::scoped_lock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end()) {
    return; // the model has been dropped meanwhile
  }
  const Registered& registered = found->second;
  if (places.size() != registered.places.size()) {
    throw InvalidUsage(concat(places.size(), " places for ", registered.places.size(), " slices"));
  }
  adopt(model, registered.map + 1, std::move(places));
}

std::vector<Placement> ServerTransport::places(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  return models_.at(model).places;
}

// Uses the new map from now on, and repeats pushes that were under way to a lost server.
void ServerTransport::adopt(ModelId model, std::uint32_t version, std::vector<Placement> places) {
  Registered& registered = models_.at(model);
  if (version <= registered.map) {
    return;
  }
  registered.map = version;
  registered.places = std::move(places);
  const FrameHeader header{.model = model, .layout = registered.layout, .map = version};
  for (auto& [server, line] : lines_) {
    FrameHeader map = header;
    map.kind = FrameKind::kMap;
    line.connection->send(
        Connection::kAtOnce, map, Payload::copyOf(writePlacements(registered.places)));
    FrameHeader switched = header;
    switched.kind = FrameKind::kSwitch;
    line.connection->send(Connection::kLast, switched, {}); // behind all pushes by the old map
  }
  pushAgain(model, registered);
}

// Repeats pushes and requests that a lost server had, or was to receive from other servers, until a
// map names no lost server. Servers apply only one of two equal pushes.
void ServerTransport::pushAgain(ModelId model, Registered& registered) {
  const bool namesLost =
      std::any_of(registered.places.begin(), registered.places.end(), [&](const Placement& place) {
        return lost_.contains(place.owner) || lost_.contains(place.replica);
      });
  const bool mayBeLost = std::exchange(registered.hasLost, namesLost) || namesLost;
  if (!mayBeLost && !asksFirst(registered)) { // requests do not move with their slice
    return;
  }
  for (SliceIndex slice = 0; slice < registered.underWay.size(); ++slice) {
    if (mayBeLost && registered.pull && !registered.pull->isTaken[slice]) {
      request(model, registered, slice);
    }
    const auto& underWay = registered.underWay[slice];
    if (underWay && underWay->done) {
      push(model, registered, slice);
    } else if (mayBeLost && registered.rounds[slice] > 0) {
      askAgain(model, registered, slice);
    }
  }
}

// Tells the owner that this round is over: a replica may have missed its end. The answer is
// ignored.
void ServerTransport::askAgain(ModelId model, const Registered& registered, SliceIndex slice) {
  const auto line = lines_.find(registered.places[slice].owner);
  if (line != lines_.end()) {
    line->second.connection->send(
        std::uint64_t{slice} + 1,
        {.kind = FrameKind::kPull,
         .model = model,
         .layout = registered.layout,
         .slice = slice,
         .round = registered.rounds[slice],
         .argument = PullArgument{kValuePart}.packed()},
        {});
  }
}

std::uint64_t ServerTransport::steps(ModelId model) const {
  const std::scoped_lock lock(mutex_);
  return models_.at(model).steps;
}

// -------------------------------------------------------------------------------------- figures

void ServerTransport::busy(Line& line) {
  if (line.underWay++ == 0) {
    line.busySince = now();
  }
}

void ServerTransport::idle(ServerId server) {
  const auto line = lines_.find(server);
  if (line != lines_.end() && line->second.underWay > 0 && --line->second.underWay == 0) {
    line->second.busySeconds += now() - line->second.busySince;
  }
}

std::vector<ServerTransport::Figures> ServerTransport::takeFigures() {
  const std::scoped_lock lock(mutex_);
  std::vector<Figures> figures;
  for (auto& [server, line] : lines_) {
    if (line.underWay > 0) {
      const double time = now();
      line.busySeconds += time - line.busySince;
      line.busySince = time;
    }
    figures.push_back({server, std::exchange(line.bytes, 0), std::exchange(line.busySeconds, 0)});
  }
  return figures;
}

ServerTransport::Updates ServerTransport::dropped() const {
  const std::scoped_lock lock(mutex_);
  return dropped_;
}

ServerTransport::Updates ServerTransport::aggregated() const {
  const std::scoped_lock lock(mutex_);
  return aggregated_;
}

// ------------------------------------------------------------------------------------- failures

void ServerTransport::giveUp(const std::vector<ServerId>& servers, const std::string& why) {
  std::vector<std::shared_ptr<Connection>> connections;
  std::exception_ptr error;
  {
    const std::scoped_lock lock(mutex_);
    for (const ServerId server : servers) {
      if (const auto line = lines_.extract(server); !line.empty()) {
        connections.push_back(line.mapped().connection);
        ended_.push_back(line.mapped().connection);
        lost_[server] = why;
      }
    }
    if (connections.empty()) {
      return;
    }
    for (const ServerId server : servers) {
      for (auto& [other, line] : lines_) {
        if (rank_ == 0) {
          line.connection->send(
              Connection::kAtOnce, {.kind = FrameKind::kGone, .argument = server},
              Payload::copyOf(why));
        }
      }
    }
    // Checked before a new map is made: no process has the state of a slice whose owner and
    // replica are lost.
    if (const auto place = lostForGood()) {
      error = std::make_exception_ptr(lossOf(*place));
    }
  }
  if (error) {
    fail(error);
  }
  for (const auto& connection : connections) {
    connection->breakOff(why); // the connection's thread then calls `lost`
  }
}

std::map<ServerId, std::uint64_t> ServerTransport::framesFrom() const {
  const std::scoped_lock lock(mutex_);
  std::map<ServerId, std::uint64_t> frames;
  for (const auto& [server, line] : lines_) {
    frames[server] = line.frames;
  }
  return frames;
}

bool ServerTransport::waits() const {
  const std::scoped_lock lock(mutex_);
  return !once_.empty() || std::any_of(models_.begin(), models_.end(), [](const auto& model) {
    const auto& underWay = model.second.underWay;
    return model.second.pull ||
        std::any_of(underWay.begin(), underWay.end(), [](const auto& slice) {
             return slice && slice->done;
           });
  });
}

void ServerTransport::lost(ServerId server, const std::string& why) {
  std::exception_ptr error;
  std::vector<Done> onces;
  {
    const std::scoped_lock lock(mutex_);
    const auto line = lines_.extract(server);
    if (!line.empty()) {
      ended_.push_back(line.mapped().connection); // this is its thread
    }
    lost_[server] = why;
    try {
      for (auto& [model, registered] : models_) {
        registered.hasLost = true;
        pushAgain(model, registered); // the new map may have come before the loss was noticed
      }
      if (const auto place = lostForGood()) {
        error = std::make_exception_ptr(lossOf(*place));
      } else if (lines_.empty()) {
        error = std::make_exception_ptr(lossOf({server, kNoServer}));
      }
    } catch (...) { // nobody above this thread could say so
      error = std::current_exception();
    }
    onces = takeOncesOf(server);
  }
  if (error) {
    fail(error);
  }
  for (const Done& done : onces) {
    done(
        std::make_exception_ptr(ServerLost(
            concat("server ", server, " is gone, and with it a sum that it made: ", why))));
  }
  onLost_(server, why);
}

// Tensors that this server was to sum. The other workers have sent theirs to it as well, so no
// other server can.
std::vector<Transport::Done> ServerTransport::takeOncesOf(ServerId server) {
  std::vector<Done> taken;
  std::erase_if(once_, [&](auto& once) {
    const bool isIts = once.second.server == server;
    if (isIts) {
      taken.push_back(std::move(once.second.done));
    }
    return isIts;
  });
  return taken;
}

// The placement of a slice under way whose state is lost. An idle slice does not count: other
// workers may have dropped its model long ago.
std::optional<Placement> ServerTransport::lostForGood() const {
  for (const auto& [model, registered] : models_) {
    for (SliceIndex slice = 0; slice < registered.underWay.size(); ++slice) {
      const auto& underWay = registered.underWay[slice];
      if (underWay && underWay->done && isLost(registered.places[slice])) {
        return registered.places[slice];
      }
    }
  }
  return std::nullopt;
}

// Whether neither the owner nor a replica is left.
bool ServerTransport::isLost(const Placement& place) const {
  return lost_.contains(place.owner) &&
      (place.replica == kNoServer || lost_.contains(place.replica));
}

ServerLost ServerTransport::lossOf(const Placement& place) const {
  const std::string& why = lost_.at(place.owner);
  if (place.replica != kNoServer) {
    return ServerLost(concat(
        "server ", place.owner, " is gone (seen by rank ", rank_, ": ", why, "), and server ",
        place.replica, ", which has the copy of its slices, too (", lost_.at(place.replica), ")"));
  }
  return ServerLost(concat(
      "server ", place.owner, " is gone, and nobody has a copy of its slices (seen by rank ", rank_,
      ": ", why, "); HVD_ORDER_PS_REPLICAS=1 keeps one on another server"));
}

void ServerTransport::fail(const std::exception_ptr& error) {
  std::vector<Done> waiting;
  {
    const std::scoped_lock lock(mutex_);
    if (!error_) {
      error_ = error;
    }
    for (auto& [model, registered] : models_) {
      for (auto& underWay : registered.underWay) {
        if (underWay && underWay->done) {
          waiting.push_back(std::move(underWay->done));
        }
        underWay.reset();
      }
    }
    for (auto& [name, once] : std::exchange(once_, {})) {
      waiting.push_back(std::move(once.done));
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
  for (auto& [server, line] : lines_) {
    silent_.insert(server);
    line.connection->send(Connection::kAtOnce, {.kind = FrameKind::kLate}, {});
  }
}

std::string ServerTransport::report() const {
  const std::scoped_lock lock(mutex_);
  std::vector<std::string> waiting;
  for (const auto& [model, registered] : models_) {
    for (SliceIndex slice = 0; slice < registered.underWay.size(); ++slice) {
      if (registered.underWay[slice]) {
        waiting.push_back(concat(
            "'", registered.names[slice], "' (server ", registered.underWay[slice]->server, ")"));
      }
    }
  }
  std::string text = concat("rank ", rank_, " waits for the servers' answers about ");
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
  const std::string text = concat("rank ", rank_, " has given up; its own error says why");
  {
    const std::scoped_lock lock(mutex_);
    // The other workers observe a lost rank or server, this transport's own error, by themselves.
    const bool othersKnow = error_ != nullptr;
    for (auto& [server, line] : lines_) {
      if (othersKnow) {
        break;
      }
      line.connection->send(
          Connection::kAtOnce, {.kind = FrameKind::kLeave}, Payload::copyOf(text));
    }
  }
  fail(std::make_exception_ptr(CollectiveError("the exchange with the servers was given up")));
}

void ServerTransport::close() noexcept {
  std::vector<std::shared_ptr<Connection>> connections;
  {
    const std::scoped_lock lock(mutex_);
    for (auto& [server, line] : lines_) {
      line.connection->send(Connection::kLast, {.kind = FrameKind::kLeave}, {});
      connections.push_back(line.connection);
    }
    connections.insert(connections.end(), ended_.begin(), ended_.end());
    lines_.clear();
    ended_.clear();
  }
  for (const auto& connection : connections) {
    connection->stop();
  }
  fail(std::make_exception_ptr(CollectiveError("the connection to the servers has been closed")));
}

} // namespace hvd_order
