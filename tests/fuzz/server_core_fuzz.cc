// Whatever frames come from workers, servers and tools, a server refuses them or works on them, and
// keeps about as much memory as they have brought.

#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "servers/server_core.h"

using namespace hvd_order;

namespace {

constexpr int kWorkers = 2;
constexpr std::size_t kLargestSlice = 64;
constexpr ModelId kModel = 1;

/// Takes numbers off the input; zeros when it has ended.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool hasMore() const {
    return !bytes_.empty();
  }
  std::uint8_t byte() {
    if (bytes_.empty()) {
      return 0;
    }
    const std::uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }
  // Mostly small, as those reach further; any number now and then.
  std::uint64_t number() {
    const std::uint8_t first = byte();
    if (first < 0xF0) {
      return first & 7U;
    }
    std::uint64_t value = 0;
    for (int i = 0; i < (first < 0xF8 ? 4 : 8); ++i) {
      value = value << 8 | byte();
    }
    return value;
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

class Drop final : public Connection {
 public:
  void start(OnFrame /*onFrame*/, OnLost onLost) override {
    lost = std::move(onLost);
  }
  void send(std::uint64_t /*urgency*/, FrameHeader /*header*/, Payload payload) override {
    for (std::size_t i = 0; i < payload.sizeBytes; ++i) {
      sum += std::to_integer<unsigned>(payload.data()[i]); // reads all of it
    }
  }
  void breakOff(const std::string& why) noexcept override {
    sum += static_cast<unsigned>(why.size());
  }
  void stop() noexcept override {}

  OnLost lost;
  unsigned sum = 0;
};

Payload payloadOf(std::span<const std::byte> bytes) {
  Payload payload = Payload::allocate(bytes.size());
  if (!bytes.empty()) {
    std::memcpy(payload.data(), bytes.data(), bytes.size());
  }
  return payload;
}

std::vector<std::byte> registration(Input& in) {
  Registration made;
  made.serversUpdate = (in.byte() & 1) != 0;
  for (std::uint64_t left = in.number() & 3; left > 0; --left) {
    SliceShape slice{16, ElementType::kFloat32, {}};
    if (made.serversUpdate) {
      slice.segments = {{0, 1, 0}, {2, 2, static_cast<std::uint32_t>(in.number() & 1)}};
    }
    made.slices.push_back(slice);
  }
  return writeRegistration(made);
}

std::vector<std::byte> rules(Input& in) {
  std::vector<UpdateRule> made(1 + (in.byte() & 1));
  for (UpdateRule& rule : made) {
    rule.kind = static_cast<RuleKind>(in.byte() % 5);
    rule.momentum = (in.byte() & 3) * 0.25;
    rule.amsgrad = (in.byte() & 1) != 0;
    rule.centered = (in.byte() & 1) != 0;
  }
  return writeRules(made);
}

std::vector<std::byte> places(Input& in) {
  std::vector<SliceOwners> made;
  for (std::uint64_t left = in.number() & 3; left > 0; --left) {
    const auto owner = static_cast<ServerId>(in.byte() % 4);
    const auto replica = static_cast<ServerId>((owner + 1 + in.byte() % 3) % 4);
    made.push_back({owner, (in.byte() & 1) != 0 ? replica : kNoServer});
  }
  return writeOwners(made);
}

std::vector<std::byte> anything(Input& in) {
  static constexpr std::size_t kSizes[] = {0, 16, 16, 8 + 8 * kWorkers, 88, 3, 4, 64};
  std::vector<std::byte> bytes(kSizes[in.byte() & 7]);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(in.byte());
  }
  return bytes;
}

// What would fit the kind, or anything.
Payload payload(Input& in, FrameKind kind, bool isOfGroup) {
  if ((in.byte() & 7) != 0) {
    if (isOfGroup && (kind == FrameKind::kPush || kind == FrameKind::kReplica)) {
      const Payload sum = payloadOf(std::vector<std::byte>(16, static_cast<std::byte>(in.byte())));
      const auto round = static_cast<Round>(in.number());
      return (in.byte() & 1) != 0 ? sum : withMembers(sum, {{{0, round}, {1, round}}});
    }
    switch (kind) {
      case FrameKind::kModel:
        return payloadOf(registration(in));
      case FrameKind::kMap:
        return payloadOf(places(in));
      case FrameKind::kRule:
        return payloadOf(rules(in));
      case FrameKind::kPush:
      case FrameKind::kReplica:
        return payloadOf(std::vector<std::byte>(16, static_cast<std::byte>(in.byte())));
      default:
        break;
    }
  }
  return payloadOf(anything(in));
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(std::span(data, size));
  const std::uint8_t how = in.byte();
  ServerOptions options;
  options.server = 0;
  options.workers = kWorkers;
  options.consistency = (how & 1) != 0 ? Consistency::kAsynchronous : Consistency::kSynchronous;
  options.staleness = (how & 2) != 0 ? 1 : ~Round{0};
  options.divergenceBound = (how & 4) != 0 ? 2.0 : 0.0;
  options.ordered = (how & 8) != 0;
  if ((how & 16) != 0) {
    options.delayBound = 1;
    options.aggregates = (how & 32) != 0;
  }
  options.largestSlice = kLargestSlice;
  const auto core = std::make_shared<ServerCore>(options);

  std::map<Peer, std::shared_ptr<Drop>> connections;
  for (const Peer peer :
       {Peer{PeerKind::kWorker, 0}, Peer{PeerKind::kWorker, 1}, Peer{PeerKind::kServer, 1},
        Peer{PeerKind::kServer, 2}, Peer{PeerKind::kObserver, 0}}) {
    connections[peer] = std::make_shared<Drop>();
    core->connect(peer, connections[peer]);
  }
  const std::vector<Peer> peers = core->peers();
  while (in.hasMore()) {
    const Peer from = peers[in.byte() % peers.size()];
    const std::uint8_t what = in.byte();
    if (what == 0xFF) {
      if (const auto lost = std::exchange(connections[from]->lost, nullptr)) {
        lost("connection reset");
      }
      continue;
    }
    FrameHeader header;
    header.kind =
        static_cast<FrameKind>(1 + what % static_cast<unsigned>(static_cast<int>(kLastFrameKind)));
    header.model = (in.byte() & 15) != 0 ? kModel : static_cast<ModelId>(in.number() - 1);
    header.layout = static_cast<std::uint32_t>((in.byte() & 7) != 0 ? 0 : in.number());
    header.slice = static_cast<std::uint32_t>(in.number());
    header.round = static_cast<std::uint32_t>(in.number());
    header.map = static_cast<std::uint32_t>(in.number());
    header.argument = in.number() << 32 | (in.number() & 0xFFFFFFFF);
    if ((what & 0x40) != 0) {
      header.argument |= std::uint64_t{in.byte()} << 56;
    }
    header.flags = in.byte() & kFrameFlags;
    Payload bytes = payload(in, header.kind, (header.flags & kFrameFlagGroup) != 0);
    header.payloadBytes = bytes.sizeBytes;
    core->onFrame(from, header, std::move(bytes)); // refuses with a line for the log
  }
  (void)core->audit();
  (void)core->lateWorkers();
  core->stop();
  return 0;
}
