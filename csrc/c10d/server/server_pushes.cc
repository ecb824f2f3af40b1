#include <algorithm>
#include <utility>

#include "base/error.h"
#include "c10d/server/server_transport.h"
#include "c10d/server/tensor_payload.h"
#include "server/wire/group.h"

// The worker's side of parameter servers: pushes, requests, answers and pulls. server_transport.cc
// has the rest.
//
// `issue` starts a round of a slice: it sends the gradient to the slice's owner, or, where servers
// bound the delay of updates, a request. The server then admits the push, directly or through a
// helper (`admitted`), or answers at once if the update would be too late. `answered` writes the
// answer into the slice's buffer and completes the slice.
//
// Invariant: a slice has at most one push under way, and its buffer keeps the gradient until the
// answer has been written. So the push can be repeated at any moment (`push`), for example to
// another owner, and an answer counts only if its round is the one under way: a later answer to
// the same round finds no `done` and is ignored.
//
// The answer is written without the lock. That is safe because `done` has been taken out before:
// no other answer is accepted for the slice, and the engine does not use the buffer before `done`
// is called.
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
  push(key.model, registered, key.index);
}

void ServerTransport::push(ModelId model, Registered& registered, SliceIndex slice) {
  UnderWay& underWay = *registered.underWay[slice];
  idle(underWay.server);
  underWay.server = registered.places[slice].owner;
  const auto line = lines_.find(underWay.server);
  if (line == lines_.end()) {
    return; // lost: the slice is sent when a new map names its owner
  }
  busy(line->second);
  FrameHeader header{
      .model = model,
      .layout = registered.layout,
      .slice = slice,
      .round = underWay.round,
      .map = registered.map};
  if (asksFirst(registered)) {
    return ask(line->second, registered, header, 0);
  }
  header.kind = FrameKind::kPush;
  line->second.connection->send(urgencyOf(slice), header, payloadOf(registered.views[slice]));
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
  const auto model = models_.find(header.model);
  const auto line = lines_.find(server);
  if (model == models_.end() || model->second.layout != header.layout ||
      header.slice >= model->second.views.size() || line == lines_.end()) {
    return; // the layout has been replaced
  }
  const Registered& registered = model->second;
  const auto& underWay = registered.underWay[header.slice];
  if (!underWay || !underWay->done || underWay->round != header.round ||
      underWay->server != server) {
    return; // another server has been asked meanwhile
  }
  FrameHeader push = header;
  push.kind = FrameKind::kPush;
  push.map = registered.map;
  auto to = line;
  if ((header.flags & kFrameFlagGroup) != 0) { // by way of a helper
    GroupOf group = groupOf(header.argument);
    to = lines_.find(std::exchange(group.server, server));
    push.argument = argumentOf(group);
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
      urgencyOf(header.slice), push, payloadOf(registered.views[header.slice]));
}

void ServerTransport::begin(Sum sum) {
  const std::uint64_t hash = hashOf(sum.name);
  const std::scoped_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  HVDO_CHECK(!lines_.empty() && !once_.contains(hash), "two tensors are called ", sum.name);
  once_[hash] = {sum.tensor, std::move(sum.done)};
  // Servers take turns; all workers sum the same tensors in the same order.
  auto line = lines_.begin();
  std::advance(line, onces_++ % lines_.size());
  line->second.connection->send(
      1,
      {.kind = FrameKind::kPush,
       .model = kNoModel,
       .layout = static_cast<std::uint32_t>(elementTypeOf(sum.tensor)),
       .argument = hash},
      payloadOf(sum.tensor));
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

void ServerTransport::answered(ServerId server, const FrameHeader& header, const Payload& payload) {
  Done done;
  at::Tensor tensor;
  {
    const std::scoped_lock lock(mutex_);
    if (header.model == kNoModel) {
      const auto once = once_.extract(header.argument);
      if (once.empty()) {
        return;
      }
      tensor = once.mapped().first;
      done = std::move(once.mapped().second);
    } else {
      const auto model = models_.find(header.model);
      if (model == models_.end() || model->second.layout != header.layout ||
          header.slice >= model->second.views.size()) {
        return; // the layout has been replaced
      }
      tensor = model->second.views[header.slice];
      model->second.steps = header.argument;
      model->second.read[header.slice] = header.argument;
      auto& underWay = model->second.underWay[header.slice];
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
      } else if (pulled_ == nullptr || header.round != 0) {
        return; // a repeated answer; a server that is lost now sent the first
      }
    }
    const bool isNothing = payload.sizeBytes == 0 && header.round == 0; // pulled too early
    if (payload.sizeBytes != tensor.nbytes() && !isNothing) {
      throw FrameError(concat("an answer of ", payload.sizeBytes, " bytes for ", tensor.nbytes()));
    }
  }
  fill(tensor, payload); // no other thread uses the tensor until the slice is done
  {
    const std::scoped_lock lock(mutex_);
    if (header.model != kNoModel) {
      if (done) {
        models_.at(header.model).underWay[header.slice].reset();
      } else if (pulled_ != nullptr) {
        pulled_->push_back(header.slice);
        changed_.notify_all();
        return;
      }
    }
  }
  if (done) {
    done(nullptr);
  }
}

std::vector<SliceIndex>
ServerTransport::pull(ModelId model, std::uint32_t part, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  const Registered& registered = models_.at(model);
  std::vector<SliceIndex> arrived;
  pulled_ = &arrived;
  const std::size_t slices = registered.views.size();
  for (SliceIndex slice = 0; slice < slices; ++slice) {
    lineFor(registered.places[slice].owner)
        .connection->send(
            std::uint64_t{slice} + 1,
            {.kind = FrameKind::kPull,
             .model = model,
             .layout = registered.layout,
             .slice = slice,
             .argument = std::uint64_t{part} << 32},
            {});
  }
  const bool whole = changed_.wait_for(
      lock, timeout, [&] { return error_ != nullptr || arrived.size() == slices; });
  pulled_ = nullptr;
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (!whole) {
    throw TransferTimeout(concat(
        arrived.size(), " of ", slices, " slices came from the servers in ",
        std::chrono::duration<double>(timeout).count(), " s"));
  }
  return arrived;
}

} // namespace hvd_order
