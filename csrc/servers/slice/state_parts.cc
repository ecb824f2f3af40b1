#include "servers/slice/state_parts.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "servers/slice/served_model.h"
#include "servers/wire/arguments.h"

// A slice's state as frames (arguments.h has their encoding).
//
// A state travels in parts, one array a frame, so no array is copied to be sent: the frames share
// the memory of the state, which an update never overwrites while a frame refers to it
// (slice_store.cc). Part 0 is the counters: steps before the model was registered, then the last
// round applied and the last round skipped, by worker.
//
// All parts have the same urgency and come over one connection, so they arrive in order and the
// last one completes the state. An original and a copy from the same server may be under way at
// once and are kept apart by their mark. A server that sends a state again begins with part 0 and
// overwrites what had arrived.
//
// Invariant: nothing is installed before all parts have come and have been checked, so the loss of
// a sender leaves no half state behind.
namespace hvd_order {

namespace {

// Most steps that an optimizer may have taken.
constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 53;

Payload counters(const SliceState& state) {
  ByteWriter out;
  out.put(state.stepsBefore);
  for (const auto* rounds : {&state.seen, &state.skipped}) {
    for (const Round round : *rounds) {
      out.put(round);
    }
  }
  return Payload::copyOf(out.bytes());
}

} // namespace

void sendState(
    const SliceContext& context,
    const SliceState& state,
    ServerId to,
    std::uint64_t urgency,
    std::uint32_t map,
    bool isCopy) {
  std::vector<Payload> parts{counters(state)};
  if (state.value) {
    parts.push_back(state.value);
    parts.insert(parts.end(), state.moments.begin(), state.moments.end());
  }
  FrameHeader header = context.about(FrameKind::kState);
  header.round = state.version;
  header.map = map;
  for (std::uint32_t part = 0; part < parts.size(); ++part) {
    header.argument =
        StateArgument{static_cast<std::uint32_t>(parts.size()), part, isCopy}.packed();
    context.send({PeerKind::kServer, to}, urgency, header, parts[part]);
  }
}

bool StateReceiver::begins(Peer from, const FrameHeader& header) {
  const bool begins = from == Peer{PeerKind::kWorker, 0};
  if (!begins && from.kind != PeerKind::kServer) {
    throw FrameError("such a frame comes from others");
  }
  if (begins && (StateArgument::of(header).isCopy || header.round != 0)) {
    throw FrameError("a slice that begins with what is no beginning");
  }
  return begins;
}

std::optional<SliceState>
StateReceiver::take(Peer from, const FrameHeader& header, Payload payload) {
  const auto parts = takePart(from, header, std::move(payload));
  if (!parts) {
    return std::nullopt;
  }
  SliceState state;
  state.version = header.round;
  ByteReader in({parts->front()->data(), parts->front()->sizeBytes});
  state.stepsBefore = in.get<std::uint64_t>();
  for (auto* rounds : {&state.seen, &state.skipped}) {
    for (int worker = 0; worker < context_.options().workers; ++worker) {
      rounds->push_back(in.get<Round>());
    }
  }
  if (parts->size() > kValuePart) {
    state.value = *(*parts)[kValuePart];
  }
  for (std::size_t moment = kValuePart + 1; moment < parts->size(); ++moment) {
    state.moments.push_back(*(*parts)[moment]);
  }
  const bool isNew =
      std::all_of(state.seen.begin(), state.seen.end(), [](Round seen) { return seen == 0; });
  if (state.stepsBefore > kMostSteps || (begins(from, header) && !isNew)) {
    throw FrameError("a state of impossible steps");
  }
  return state;
}

// @return all parts once the last one has come.
std::optional<StateReceiver::Parts>
StateReceiver::takePart(Peer from, const FrameHeader& header, Payload payload) {
  const auto [parts, part, isCopy] = StateArgument::of(header);
  const bool updates = context_.model.registration.serversUpdate;
  const std::uint32_t least = updates ? kValuePart + 1 : 1;
  const std::uint32_t most = updates ? kMostParts : kValuePart + 1;
  const auto workers = static_cast<std::size_t>(context_.options().workers);
  const std::size_t expected = part == kCountersPart
      ? sizeof(std::uint64_t) + 2 * sizeof(Round) * workers
      : context_.sizeBytes();
  if (parts < least || parts > most || part >= parts || payload.sizeBytes != expected) {
    throw FrameError(concat("part ", part, " of ", parts, " of a state, of ", payload.sizeBytes));
  }
  const std::pair key{from, isCopy};
  auto& incoming = incoming_[key];
  incoming.resize(parts);
  incoming[part] = std::move(payload);
  if (part + 1 < parts) {
    return std::nullopt;
  }
  Parts arrived = std::move(incoming_.extract(key).mapped());
  if (!std::all_of(arrived.begin(), arrived.end(), [](const auto& p) { return p.has_value(); })) {
    throw FrameError("parts of a state are missing");
  }
  return arrived;
}

void StateReceiver::forget(ServerId server) {
  for (const bool isCopy : {false, true}) {
    incoming_.erase({{PeerKind::kServer, server}, isCopy});
  }
}

} // namespace hvd_order
