#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/scope_exit.h"
#include "servers/c10d/server_transport.h"
#include "servers/c10d/tensor_payload.h"
#include "servers/wire/arguments.h"

// The worker's side of parameter servers: pushes, requests, answers and pulls. server_transport.cc
// has the rest.
//
// `issue` starts a round of a slice: it sends the gradient to the slice's owner, or, where servers
// bound the delay of updates, a request. The server then admits the push, directly or through a
// helper (`admitted`), or answers at once if the update would be too late. `answered` writes the
// answer into the slice's buffer and completes the slice.
//
// Invariant: a slice has at most one push under way, and its buffer keeps the gradient until the
// answer is written. So the push can be repeated at any moment (`push`), for example to another
// owner, and an answer counts only if its round is the one under way: a later answer to the same
// round finds no `done` and is ignored. The first push of a round shares the buffer's memory. A
// repeated one is a copy: an answer that another server sent before may come while the push still
// waits in the queue of its connection, and would travel as the gradient. A replica that lacks
// that round (divergence bound) would apply it.
//
// The answer is written without the lock. That is safe because `done` has been taken out before:
// no other answer is accepted for the slice, and the engine does not use the buffer before `done`
// is called.
//
// Nothing is taken out, and nothing left behind, by a call that throws: a slice whose `issue`
// throws is not under way, and an answer that does not fit leaves its slice to the connection's
// loss.
namespace hvd_order {

namespace {

// FNV-1a: the same on every worker.
std::uint64_t hashOf(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

} // namespace

void ServerTransport::issue(SliceKey key, const Slice& /*slice*/, Done done) {
  const std::scoped_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  Registered& registered = models_.at(key.model);
  if (const Placement& place = registered.places.at(key.index); isLost(place)) {
    throw lossOf(place);
  }
  auto& underWay = registered.underWay.at(key.index);
  HVDO_CHECK(!underWay, "slice ", key.index, " is under way already");
  underWay = UnderWay{std::move(done), ++registered.rounds[key.index], kNoServer};
  try {
    push(key.model, registered, key.index);
  } catch (...) { // the slice counts as failed, so nobody may call `done` later
    underWay.reset();
    --registered.rounds[key.index];
    throw;
  }
}

void ServerTransport::push(ModelId model, Registered& registered, SliceIndex slice) {
  UnderWay& underWay = *registered.underWay[slice];
  idle(std::exchange(underWay.server, kNoServer));
  const ServerId owner = registered.places[slice].owner;
  const auto line = lines_.find(owner);
  if (line == lines_.end()) {
    underWay.server = owner;
    return; // lost: the slice is sent when a new map names its owner
  }
  FrameHeader header{
      .model = model,
      .layout = registered.layout,
      .slice = slice,
      .round = underWay.round,
      .map = registered.map};
  if (asksFirst(registered)) {
    ask(line->second, registered, header, 0);
  } else {
    header.kind = FrameKind::kPush;
    line->second.connection->send(
        urgencyOf(slice), header, gradientOf(registered, underWay, slice));
  }
  underWay.server = owner;
  busy(line->second);
}

// The payload of the next push of the slice under way.
Payload
ServerTransport::gradientOf(const Registered& registered, UnderWay& underWay, SliceIndex slice) {
  Payload gradient = payloadOf(registered.views[slice]);
  if (std::exchange(underWay.isRepeated, true)) {
    return Payload::copyOf(std::span(gradient.data(), gradient.sizeBytes));
  }
  return gradient;
}

void ServerTransport::ask(
    Line& line,
    const Registered& registered,
    FrameHeader header,
    std::uint16_t flags) {
  header.kind = FrameKind::kAsk;
  header.flags = flags;
  header.argument = registered.read[header.slice];
  line.connection->send(Connection::kAtOnce, header, {});
}

bool ServerTransport::asksFirst(const Registered& registered) const {
  return asksFirst_ && registered.registration.serversUpdate;
}

std::uint64_t ServerTransport::urgencyOf(SliceIndex slice) const {
  return ordered_ ? std::uint64_t{slice} + 1 : 1;
}

void ServerTransport::admitted(ServerId server, const FrameHeader& header) {
  const std::scoped_lock lock(mutex_);
  Registered* const found = registeredFor(header);
  const auto line = lines_.find(server);
  if (found == nullptr || line == lines_.end()) {
    return;
  }
  Registered& registered = *found;
  auto& underWay = registered.underWay[header.slice];
  if (!underWay || !underWay->done || underWay->round != header.round ||
      underWay->server != server) {
    return; // another server has been asked meanwhile
  }
  FrameHeader push = header;
  push.kind = FrameKind::kPush;
  push.map = registered.map;
  auto to = line;
  if ((header.flags & kFrameFlagGroup) != 0) { // by way of a helper
    auto group = GroupArgument::of(header);
    to = lines_.find(std::exchange(group.server, server));
    push.argument = group.packed();
  }
  if (to == lines_.end()) { // the helper is not connected yet, or lost
    ask(line->second, registered, push, kFrameFlagDirect);
    return;
  }
  if (to != line) {
    ++aggregated_.slices;
    aggregated_.bytes += static_cast<ByteCount>(registered.views[header.slice].nbytes());
  }
  to->second.connection->send(
      urgencyOf(header.slice), push, gradientOf(registered, *underWay, header.slice));
}

void ServerTransport::begin(Sum sum) {
  const std::uint64_t hash = hashOf(sum.name);
  const std::scoped_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  HVDO_CHECK(!lines_.empty() && !once_.contains(hash), "two tensors are called ", sum.name);
  const FrameHeader header{
      .kind = FrameKind::kPush,
      .model = kNoModel,
      .layout = static_cast<std::uint32_t>(elementTypeOf(sum.tensor)),
      .argument = hash};
  Payload payload = payloadOf(sum.tensor);
  // Servers take turns; all workers sum the same tensors in the same order.
  auto line = lines_.begin();
  std::advance(line, onces_++ % lines_.size());
  line->second.connection->send(1, header, std::move(payload));
  once_.emplace(hash, Once{sum.tensor, std::move(sum.done), line->first}); // answers need the lock
}

void ServerTransport::onFrame(ServerId server, const FrameHeader& header, const Payload& payload) {
  {
    const std::scoped_lock lock(mutex_);
    if (const auto line = lines_.find(server); line != lines_.end()) {
      ++line->second.frames;
    }
  }
  switch (header.kind) {
    case FrameKind::kValue:
      return answered(server, header, payload);
    case FrameKind::kAdmit:
      return admitted(server, header);
    case FrameKind::kMap: {
      auto places = readPlacements({payload.data(), payload.sizeBytes});
      const std::scoped_lock lock(mutex_);
      const auto model = models_.find(header.model);
      if (model != models_.end() && model->second.layout == header.layout &&
          model->second.places.size() == places.size()) {
        adopt(header.model, header.map, std::move(places));
      } else if (
          const auto line = lines_.find(server); header.layout < layouts_ && line != lines_.end()) {
        // Workers drop a model at different times: this one sends no more frames about it.
        line->second.connection->send(
            Connection::kLast,
            {.kind = FrameKind::kSwitch,
             .model = header.model,
             .layout = header.layout,
             .map = header.map},
            {});
      }
      return;
    }
    case FrameKind::kLost:
      return fail(
          std::make_exception_ptr(ServerLost(
              std::string(reinterpret_cast<const char*>(payload.data()), payload.sizeBytes))));
    case FrameKind::kGone:
      return giveUp(
          {static_cast<ServerId>(header.argument)},
          std::string(reinterpret_cast<const char*>(payload.data()), payload.sizeBytes));
    case FrameKind::kLate: {
      const std::scoped_lock lock(mutex_);
      silent_.erase(server);
      ByteReader ranks({payload.data(), payload.sizeBytes});
      while (ranks.left() > 0) {
        late_.insert(static_cast<Rank>(ranks.get<std::uint32_t>()));
      }
      return;
    }
    case FrameKind::kControl:
      return onControl_(
          server, std::string(reinterpret_cast<const char*>(payload.data()), payload.sizeBytes));
    default:
      throw FrameError("such a frame is for servers");
  }
}

// The model of a frame about a slice; null if its layout has been replaced. Called under the lock.
ServerTransport::Registered* ServerTransport::registeredFor(const FrameHeader& header) {
  const auto model = models_.find(header.model);
  const bool known = model != models_.end() && model->second.layout == header.layout &&
      header.slice < model->second.views.size();
  return known ? &model->second : nullptr;
}

void ServerTransport::answered(ServerId server, const FrameHeader& header, const Payload& payload) {
  Done done;
  at::Tensor tensor;
  const auto check = [&](bool mayBeNothing) {
    if (payload.sizeBytes != tensor.nbytes() && !(mayBeNothing && payload.sizeBytes == 0)) {
      throw FrameError(concat("an answer of ", payload.sizeBytes, " bytes for ", tensor.nbytes()));
    }
  };
  {
    const std::scoped_lock lock(mutex_);
    if (header.model == kNoModel) {
      const auto once = once_.find(header.argument);
      if (once == once_.end()) {
        return;
      }
      tensor = once->second.tensor;
      check(/*mayBeNothing=*/false);
      done = std::move(once->second.done);
      once_.erase(once);
    } else {
      Registered* const model = registeredFor(header);
      if (model == nullptr) {
        return;
      }
      tensor = model->views[header.slice];
      const bool isPulled = header.round == 0;
      check(/*mayBeNothing=*/isPulled); // pulled too early
      model->steps = header.argument;
      model->read[header.slice] = header.argument;
      auto& underWay = model->underWay[header.slice];
      if (underWay && underWay->done && underWay->round == header.round) {
        done = std::exchange(underWay->done, nullptr);
        idle(underWay->server); // may differ from `server`, which may have got the push passed on
        if ((header.flags & kFrameFlagLate) != 0) {
          ++dropped_.slices;
          dropped_.bytes += static_cast<ByteCount>(tensor.nbytes());
        }
        if (const auto line = lines_.find(server); line != lines_.end()) {
          line->second.bytes += static_cast<ByteCount>(payload.sizeBytes);
        }
      } else if (
          !isPulled || !model->pull || model->pull->part != header.map ||
          model->pull->isTaken[header.slice]) {
        return; // a repeated answer; a server that is lost now sent the first
      } else {
        model->pull->isTaken[header.slice] = true;
      }
    }
  }
  std::exception_ptr error;
  try {
    fill(tensor, payload); // no other thread uses the tensor until the slice is done
  } catch (...) {
    error = std::current_exception(); // a device's, and the gradient may be gone
  }
  finish(header, done, error);
}

// Ends the wait for an answer that is in its buffer, or that could not be written there.
void ServerTransport::finish(
    const FrameHeader& header,
    const Done& done,
    const std::exception_ptr& error) {
  if (header.model != kNoModel) {
    const std::scoped_lock lock(mutex_);
    Registered* const model = registeredFor(header);
    if (model != nullptr && done) {
      model->underWay[header.slice].reset();
    } else if (model != nullptr && model->pull) {
      model->pull->arrived.push_back(header.slice);
      model->pull->error = error ? error : model->pull->error;
      changed_.notify_all();
    }
  }
  if (done) {
    done(error);
  }
}

std::vector<SliceIndex>
ServerTransport::pull(ModelId model, std::uint32_t part, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  Registered& registered = models_.at(model);
  if (registered.pull || registered.pulledInVain) {
    throw InvalidUsage(concat(
        "model ", model, " cannot be fetched from the servers: ",
        registered.pull ? "another thread does so already"
                        : "that has failed before, and late answers could be taken for new ones"));
  }
  const std::size_t slices = registered.views.size();
  const auto mine =
      std::make_shared<Pull>(Pull{part, std::vector<bool>(slices, false), {}, nullptr});
  const auto isWhole = [&] { return mine->arrived.size() == slices; };
  registered.pull = mine;
  const ScopeExit forget([&] {              // however this call ends; under the lock
    const auto found = models_.find(model); // the layout may have been replaced meanwhile
    if (found != models_.end() && found->second.pull == mine) {
      found->second.pull = nullptr;
      found->second.pulledInVain = !isWhole();
    }
  });
  for (SliceIndex slice = 0; slice < slices; ++slice) {
    if (const ServerId owner = registered.places[slice].owner; !lost_.contains(owner)) {
      lineFor(owner); // throws if there is none
    }
    request(model, registered, slice);
  }
  changed_.wait_for(lock, timeout, [&] { return error_ || mine->error || isWhole(); });
  if (const std::exception_ptr error = error_ ? error_ : mine->error) {
    std::rethrow_exception(error);
  }
  if (!isWhole()) {
    throw TransferTimeout(concat(
        mine->arrived.size(), " of ", slices, " slices came from the servers in ",
        std::chrono::duration<double>(timeout).count(), " s"));
  }
  return mine->arrived; // a copy: `forget` looks at it
}

// Asks for a slice of the pull. If its owner is lost, the replica is asked once a map names it.
void ServerTransport::request(ModelId model, Registered& registered, SliceIndex slice) {
  const Placement& place = registered.places[slice];
  if (isLost(place)) {
    registered.pull->error = std::make_exception_ptr(lossOf(place));
    changed_.notify_all();
  } else if (const auto line = lines_.find(place.owner); line != lines_.end()) {
    line->second.connection->send(
        std::uint64_t{slice} + 1,
        {.kind = FrameKind::kPull,
         .model = model,
         .layout = registered.layout,
         .slice = slice,
         .argument = PullArgument{registered.pull->part}.packed()},
        {});
  }
}

} // namespace hvd_order
