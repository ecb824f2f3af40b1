#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "servers/server_core.h"
#include "servers/wire/arguments.h"
#include "servers/wire/group.h"
#include "servers/worker/model_registration.h"

// Parameter servers and workers in one thread: connections deliver when a seeded generator says so,
// each in the order that connection.h promises. A server may be lost at any moment; what it has
// sent arrives up to any frame.
namespace hvd_order::test {

inline Payload payloadOf(const std::vector<float>& values) {
  return Payload::copyOf(std::as_bytes(std::span(values)));
}

inline Payload payloadOf(const std::vector<std::byte>& bytes) {
  return Payload::copyOf(bytes);
}

inline std::vector<float> floatsOf(const Payload& payload) {
  std::vector<float> values(payload.sizeBytes / sizeof(float));
  if (!values.empty()) {
    std::memcpy(values.data(), payload.data(), values.size() * sizeof(float));
  }
  return values;
}

struct Sent {
  std::uint64_t urgency;
  FrameHeader header;
  Payload payload;
};

/// Keeps what is sent; what comes is put in by hand.
class RecordingLink final : public Connection {
 public:
  void start(OnFrame onFrame, OnLost onLost) override {
    frame = std::move(onFrame);
    lost = std::move(onLost);
  }
  void send(std::uint64_t urgency, FrameHeader header, Payload payload) override {
    header.payloadBytes = payload.sizeBytes;
    const std::scoped_lock lock(mutex);
    sent.push_back({urgency, header, std::move(payload)});
  }
  void breakOff(const std::string& why) noexcept override {
    brokenOff = why;
  }
  void stop() noexcept override {}

  std::vector<Sent> taken() {
    const std::scoped_lock lock(mutex);
    return std::exchange(sent, {});
  }

  OnFrame frame;
  OnLost lost;
  std::string brokenOff; // and why
  std::mutex mutex;
  std::vector<Sent> sent;
};

class World {
 public:
  explicit World(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t end) {
    return random_() % end;
  }
  bool chance(double probability) {
    return static_cast<double>(below(1'000'000)) < probability * 1e6;
  }

  /// What one end sends to the other.
  struct Pipe {
    std::map<std::pair<std::uint64_t, std::uint64_t>, Sent> queue; // by urgency, then order
    std::deque<Sent> wire;
    std::uint64_t order = 0;
    bool broken = false; // once the wire is empty, the receiver hears of it
    bool over = false;
    unsigned speed = 1;
    Connection::OnFrame frame; // of the receiver
    Connection::OnLost lost;
  };

  class End final : public Connection {
   public:
    End(World& world, Peer me, Peer other) : world_(world), me_(me), other_(other) {}
    void start(OnFrame onFrame, OnLost onLost) override {
      Pipe& in = world_.pipe(other_, me_);
      in.frame = std::move(onFrame);
      in.lost = std::move(onLost);
    }
    void send(std::uint64_t urgency, FrameHeader header, Payload payload) override {
      Pipe& out = world_.pipe(me_, other_);
      header.payloadBytes = payload.sizeBytes;
      if (world_.onSend) {
        world_.onSend(me_, other_, header, payload);
      }
      if (!out.broken) {
        out.queue[{urgency, out.order++}] = {urgency, header, std::move(payload)};
      }
    }
    void breakOff(const std::string& /*why*/) noexcept override {
      Pipe& out = world_.pipe(me_, other_); // what is on its way arrives
      out.queue.clear();
      out.broken = true;
      Pipe& in = world_.pipe(other_, me_);
      in.queue.clear();
      in.wire.clear();
      in.broken = true;
    }
    void stop() noexcept override {}

   private:
    World& world_;
    Peer me_;
    Peer other_;
  };

  std::shared_ptr<Connection> end(Peer me, Peer other) {
    pipe(me, other).speed = 1 + static_cast<unsigned>(below(20));
    return std::make_shared<End>(*this, me, other);
  }
  Pipe& pipe(Peer from, Peer to) {
    return pipes_[{from, to}];
  }

  void kill(Peer peer) {
    for (auto& [ends, pipe] : pipes_) {
      if (ends.first != peer && ends.second != peer) {
        continue;
      }
      pipe.queue.clear();
      pipe.broken = true;
      if (ends.second == peer) {
        pipe.wire.clear();
        pipe.over = true;
      } else {
        pipe.wire.resize(below(pipe.wire.size() + 1));
      }
    }
  }

  /// Moves one frame on. @return false if there is nothing to move.
  bool step() {
    struct Choice {
      Peer from;
      Peer to;
      Pipe* pipe;
      bool transmits;
    };
    std::vector<Choice> choices;
    std::vector<unsigned> weights;
    unsigned total = 0;
    for (auto& [ends, pipe] : pipes_) {
      if (pipe.over || !pipe.frame) {
        continue;
      }
      for (const bool transmits : {true, false}) {
        if (transmits ? !pipe.queue.empty() && pipe.wire.size() < 3
                      : !pipe.wire.empty() || pipe.broken) {
          choices.push_back({ends.first, ends.second, &pipe, transmits});
          weights.push_back(total += pipe.speed);
        }
      }
    }
    if (choices.empty()) {
      return false;
    }
    const auto drawn = static_cast<unsigned>(below(total));
    const auto at = std::upper_bound(weights.begin(), weights.end(), drawn) - weights.begin();
    const auto [from, to, pipe, transmits] = choices[static_cast<std::size_t>(at)];
    if (transmits) {
      const auto next = pipe->queue.begin();
      pipe->wire.push_back(std::move(next->second));
      pipe->queue.erase(next);
    } else if (pipe->wire.empty()) {
      pipe->over = true;
      if (onLost) {
        onLost(to, from);
      }
      pipe->lost("connection reset");
    } else {
      const Sent frame = std::move(pipe->wire.front());
      pipe->wire.pop_front();
      if (onDelivery) {
        onDelivery(from, to, frame.header);
      }
      pipe->frame(frame.header, frame.payload);
    }
    return true;
  }

  std::function<void(Peer from, Peer to, const FrameHeader& header, const Payload& payload)> onSend;
  std::function<void(Peer from, Peer to, const FrameHeader& header)> onDelivery;
  std::function<void(Peer at, Peer gone)> onLost;

 private:
  std::mt19937_64 random_;
  std::map<std::pair<Peer, Peer>, Pipe> pipes_;
};

inline Peer worker(int rank) {
  return {PeerKind::kWorker, rank};
}
inline Peer server(int number) {
  return {PeerKind::kServer, number};
}

/// A worker's side of the protocol: what csrc/servers/worker keeps, and pushes, requests and
/// answers as csrc/servers/c10d/model_pushes.cc has them.
class SimulatedWorker {
 public:
  using OnAnswer = std::function<void(SliceIndex slice, Round round, const Payload& value)>;
  static constexpr ModelId kModel = 3;

  SimulatedWorker(int rank, OnAnswer onAnswer) : rank_(rank), onAnswer_(std::move(onAnswer)) {}

  void connect(ServerId server, const std::shared_ptr<Connection>& connection) {
    connections_.add(server, connection);
    connection->start(
        [this, server](const FrameHeader& header, const Payload& payload) {
          onFrame(server, header, payload);
        },
        [this, server](const std::string& why) { lost(server, why); });
    if (model_) {
      model_->sendTo(*connection);
    }
  }
  /// Counts a server as lost that may live; worker 0 tells the others.
  void giveUp(ServerId server) {
    const auto connection = connections_.lose(server, "silent");
    if (connection == nullptr) {
      return;
    }
    if (rank_ == 0) {
      connections_.sendToAll(
          Connection::kAtOnce, {.kind = FrameKind::kGone, .argument = server}, {});
    }
    connection->breakOff("silent");
  }

  void setBuffers(const Registration& registration, const std::vector<SliceOwners>& places) {
    rounds.assign(places.size(), 0);
    underWay.resize(places.size());
    read.assign(places.size(), 0);
    readBefore.assign(places.size(), 0);
    late.assign(places.size(), 0);
    model_.emplace(kModel, 0, registration, places);
    for (const ServerId server : connections_.servers()) {
      model_->sendTo(connections_.at(server));
    }
  }

  void begin(SliceIndex slice, std::uint32_t part, std::uint32_t parts, const Payload& payload) {
    if (Connection* owner = connections_.find(model_->firstOwner(slice))) {
      FrameHeader header = model_->about(FrameKind::kState, slice);
      header.argument = StateArgument{parts, part}.packed();
      owner->send(Connection::kAtOnce, header, payload);
    }
  }

  void setRules(const std::vector<UpdateRule>& rules) {
    model_->setRules(
        rules, *std::max_element(rounds.begin(), rounds.end()) + 1,
        *std::min_element(rounds.begin(), rounds.end()), connections_);
  }

  void setMap(const std::vector<SliceOwners>& places) {
    adopt(model_->map() + 1, places);
  }

  void issue(SliceIndex slice, Payload gradient) {
    underWay[slice] = UnderWay{++rounds[slice], std::move(gradient)};
    readBefore[slice] = read[slice];
    push(slice);
  }

  struct UnderWay {
    Round round;
    Payload gradient;
  };
  std::vector<Round> rounds;
  std::vector<std::optional<UnderWay>> underWay;
  std::function<void(ServerId server)> onLost;

  bool asksFirst = false;
  std::vector<std::uint64_t> read;       // by slice, steps of the last answer
  std::vector<std::uint64_t> readBefore; // the same when the last push was issued
  std::vector<Round> late;               // by slice, pushes that were not wanted

 private:
  void adopt(std::uint32_t version, const std::vector<SliceOwners>& places) {
    if (model_->adopt(version, places, connections_)) {
      pushAgain();
    }
  }

  void pushAgain() {
    const auto& places = model_->places();
    const bool namesLost = std::any_of(places.begin(), places.end(), [&](const SliceOwners& place) {
      return connections_.isLost(place.owner) || connections_.isLost(place.replica);
    });
    const bool mayBeLost = std::exchange(hasLost_, namesLost) || namesLost;
    if (!mayBeLost && !asksFirst) {
      return;
    }
    for (SliceIndex slice = 0; slice < underWay.size(); ++slice) {
      if (underWay[slice]) {
        push(slice);
      } else if (!mayBeLost) {
        continue;
      } else if (
          Connection* owner = connections_.find(places[slice].owner);
          owner != nullptr && rounds[slice] > 0) {
        FrameHeader header = model_->about(FrameKind::kPull, slice);
        header.round = rounds[slice];
        header.argument = PullArgument{kValuePart}.packed();
        owner->send(std::uint64_t{slice} + 1, header, {});
      }
    }
  }

  void push(SliceIndex slice) {
    askedAt_[slice] = model_->places()[slice].owner;
    Connection* owner = connections_.find(askedAt_[slice]);
    if (owner == nullptr) {
      return;
    }
    FrameHeader header = model_->about(asksFirst ? FrameKind::kAsk : FrameKind::kPush, slice);
    header.round = underWay[slice]->round;
    header.map = model_->map();
    header.argument = asksFirst ? read[slice] : 0;
    if (asksFirst) {
      owner->send(Connection::kAtOnce, header, {});
    } else {
      owner->send(std::uint64_t{slice} + 1, header, underWay[slice]->gradient);
    }
  }

  void admitted(ServerId server, const FrameHeader& header) {
    const auto& open = underWay[header.slice];
    Connection* owner = connections_.find(server);
    if (!open || open->round != header.round || askedAt_[header.slice] != server ||
        owner == nullptr) {
      return;
    }
    FrameHeader push = model_->about(FrameKind::kPush, header.slice);
    push.round = header.round;
    push.map = model_->map();
    Connection* to = owner;
    if ((header.flags & kFrameFlagGroup) != 0) {
      auto group = GroupArgument::of(header);
      to = connections_.find(std::exchange(group.server, server));
      push.flags = kFrameFlagGroup;
      push.argument = group.packed();
    }
    if (to == nullptr) {
      push.kind = FrameKind::kAsk;
      push.flags = kFrameFlagDirect;
      push.argument = read[header.slice];
      owner->send(Connection::kAtOnce, push, {});
      return;
    }
    to->send(std::uint64_t{header.slice} + 1, push, open->gradient);
  }

  void onFrame(ServerId server, const FrameHeader& header, const Payload& payload) {
    if (header.kind == FrameKind::kAdmit) {
      return admitted(server, header);
    }
    if (header.kind == FrameKind::kGone) {
      return giveUp(static_cast<ServerId>(header.argument));
    }
    if (header.kind == FrameKind::kMap) {
      if (model_) {
        adopt(header.map, readOwners({payload.data(), payload.sizeBytes}));
      }
      return;
    }
    if (header.kind != FrameKind::kValue) {
      throw Failure(concat("worker ", rank_, " got a frame of kind ", int(header.kind)));
    }
    auto& slot = underWay[header.slice];
    if (slot && slot->round == header.round) {
      slot.reset();
      read[header.slice] = header.argument;
      late[header.slice] += (header.flags & kFrameFlagLate) != 0 ? 1 : 0;
      onAnswer_(header.slice, header.round, payload);
    }
  }

  void lost(ServerId server, const std::string& why) {
    connections_.lose(server, why);
    if (model_) {
      hasLost_ = true;
      pushAgain();
    }
    if (onLost) {
      onLost(server);
    }
  }

  const int rank_;
  const OnAnswer onAnswer_;
  ServerConnections connections_;
  std::optional<ModelRegistration> model_;
  std::map<SliceIndex, ServerId> askedAt_;
  bool hasLost_ = false;
};

} // namespace hvd_order::test
