#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "servers/server_core.h"
#include "servers/wire/arguments.h"
#include "servers/wire/group.h"

// Parameter servers and workers in one thread: connections deliver when a seeded generator says so,
// each in the order that connection.h promises. A server may be lost at any moment; what it has
// sent arrives up to any frame.
namespace hvd_order::test {

inline Payload payloadOf(const std::vector<float>& values) {
  Payload payload = Payload::allocate(values.size() * sizeof(float));
  std::memcpy(payload.data(), values.data(), payload.sizeBytes);
  return payload;
}

inline Payload payloadOf(const std::vector<std::byte>& bytes) {
  Payload payload = Payload::allocate(bytes.size());
  if (!bytes.empty()) {
    std::memcpy(payload.data(), bytes.data(), bytes.size());
  }
  return payload;
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

/// A worker's side of the protocol, as csrc/transport/server_transport.cc has it.
class SimulatedWorker {
 public:
  using OnAnswer = std::function<void(SliceIndex slice, Round round, const Payload& value)>;
  static constexpr ModelId kModel = 3;

  SimulatedWorker(int rank, OnAnswer onAnswer) : rank_(rank), onAnswer_(std::move(onAnswer)) {}

  void connect(ServerId server, const std::shared_ptr<Connection>& connection) {
    lines_[server] = connection;
    connection->start(
        [this, server](const FrameHeader& header, const Payload& payload) {
          onFrame(server, header, payload);
        },
        [this, server](const std::string& /*why*/) { lost(server); });
    if (registered_) {
      tell(*connection);
    }
  }
  /// Counts a server as lost that may live; worker 0 tells the others.
  void giveUp(ServerId server) {
    auto line = lines_.extract(server);
    if (line.empty()) {
      return;
    }
    lost_.insert(server);
    for (const auto& [other, connection] : lines_) {
      if (rank_ == 0) {
        connection->send(Connection::kAtOnce, {.kind = FrameKind::kGone, .argument = server}, {});
      }
    }
    line.mapped()->breakOff("silent");
  }

  void setBuffers(Registration registration, std::vector<SliceOwners> places) {
    registration_ = std::move(registration);
    firstPlaces = places;
    places_ = std::move(places);
    rounds.assign(places_.size(), 0);
    underWay.resize(places_.size());
    read.assign(places_.size(), 0);
    readBefore.assign(places_.size(), 0);
    late.assign(places_.size(), 0);
    registered_ = true;
    for (const auto& [server, connection] : lines_) {
      tell(*connection);
    }
  }

  void begin(SliceIndex slice, std::uint32_t part, std::uint32_t parts, const Payload& payload) {
    const auto line = lines_.find(firstPlaces[slice].owner);
    if (line != lines_.end()) {
      FrameHeader header = about(FrameKind::kState, slice);
      header.argument = StateArgument{parts, part}.packed();
      line->second->send(Connection::kAtOnce, header, payload);
    }
  }

  void setRules(const std::vector<UpdateRule>& rules) {
    const Round next = *std::max_element(rounds.begin(), rounds.end()) + 1;
    const Round oldest = *std::min_element(rounds.begin(), rounds.end());
    rules_.push_back({++rulesGiven_, next, payloadOf(writeRules(rules))});
    while (rules_.size() > 1 && rules_[1].since <= oldest) {
      rules_.pop_front();
    }
    for (const auto& [server, connection] : lines_) {
      sayRules(*connection, rules_.back());
    }
  }

  void setMap(std::vector<SliceOwners> places) {
    adopt(map_ + 1, std::move(places));
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
  std::vector<SliceOwners> firstPlaces;
  std::vector<Round> rounds;
  std::vector<std::optional<UnderWay>> underWay;
  std::function<void(ServerId server)> onLost;

  bool asksFirst = false;
  std::vector<std::uint64_t> read;       // by slice, steps of the last answer
  std::vector<std::uint64_t> readBefore; // the same when the last push was issued
  std::vector<Round> late;               // by slice, pushes that were not wanted

 private:
  [[nodiscard]] FrameHeader about(FrameKind kind, SliceIndex slice = 0) const {
    return {.kind = kind, .model = kModel, .slice = slice};
  }

  struct GivenRules {
    RulesNumber number;
    Round since;
    Payload payload;
  };

  static void sayRules(Connection& connection, const GivenRules& rules) {
    connection.send(
        Connection::kAtOnce,
        {.kind = FrameKind::kRule, .model = kModel, .round = rules.since, .argument = rules.number},
        rules.payload);
  }

  void tell(Connection& connection) {
    connection.send(
        Connection::kAtOnce, about(FrameKind::kModel), payloadOf(writeRegistration(registration_)));
    FrameHeader map = about(FrameKind::kMap);
    map.map = map_;
    connection.send(Connection::kAtOnce, map, payloadOf(writeOwners(places_)));
    for (const GivenRules& rules : rules_) {
      sayRules(connection, rules);
    }
  }

  void adopt(std::uint32_t version, std::vector<SliceOwners> places) {
    if (version <= map_) {
      return;
    }
    map_ = version;
    places_ = std::move(places);
    for (const auto& [server, connection] : lines_) {
      FrameHeader header = about(FrameKind::kMap);
      header.map = version;
      connection->send(Connection::kAtOnce, header, payloadOf(writeOwners(places_)));
      header.kind = FrameKind::kSwitch;
      connection->send(Connection::kLast, header, {});
    }
    pushAgain();
  }

  void pushAgain() {
    const bool namesLost =
        std::any_of(places_.begin(), places_.end(), [&](const SliceOwners& place) {
          return lost_.contains(place.owner) || lost_.contains(place.replica);
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
          const auto line = lines_.find(places_[slice].owner);
          line != lines_.end() && rounds[slice] > 0) {
        FrameHeader header = about(FrameKind::kPull, slice);
        header.round = rounds[slice];
        header.argument = PullArgument{kValuePart}.packed();
        line->second->send(std::uint64_t{slice} + 1, header, {});
      }
    }
  }

  void push(SliceIndex slice) {
    const auto line = lines_.find(places_[slice].owner);
    askedAt_[slice] = places_[slice].owner;
    if (line != lines_.end()) {
      FrameHeader header = about(asksFirst ? FrameKind::kAsk : FrameKind::kPush, slice);
      header.round = underWay[slice]->round;
      header.map = map_;
      header.argument = asksFirst ? read[slice] : 0;
      if (asksFirst) {
        line->second->send(Connection::kAtOnce, header, {});
      } else {
        line->second->send(std::uint64_t{slice} + 1, header, underWay[slice]->gradient);
      }
    }
  }

  void admitted(ServerId server, const FrameHeader& header) {
    const auto& open = underWay[header.slice];
    const auto line = lines_.find(server);
    if (open && open->round == header.round && askedAt_[header.slice] == server &&
        line != lines_.end()) {
      FrameHeader push = about(FrameKind::kPush, header.slice);
      push.round = header.round;
      push.map = map_;
      auto to = line;
      if ((header.flags & kFrameFlagGroup) != 0) {
        auto group = GroupArgument::of(header);
        to = lines_.find(std::exchange(group.server, server));
        push.flags = kFrameFlagGroup;
        push.argument = group.packed();
      }
      if (to == lines_.end()) {
        push.kind = FrameKind::kAsk;
        push.flags = kFrameFlagDirect;
        push.argument = read[header.slice];
        line->second->send(Connection::kAtOnce, push, {});
        return;
      }
      to->second->send(std::uint64_t{header.slice} + 1, push, open->gradient);
    }
  }

  void onFrame(ServerId server, const FrameHeader& header, const Payload& payload) {
    if (header.kind == FrameKind::kAdmit) {
      return admitted(server, header);
    }
    if (header.kind == FrameKind::kGone) {
      return giveUp(static_cast<ServerId>(header.argument));
    }
    if (header.kind == FrameKind::kMap) {
      if (registered_) {
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

  void lost(ServerId server) {
    lines_.erase(server);
    lost_.insert(server);
    if (registered_) {
      hasLost_ = true;
      pushAgain();
    }
    if (onLost) {
      onLost(server);
    }
  }

  const int rank_;
  const OnAnswer onAnswer_;
  std::map<ServerId, std::shared_ptr<Connection>> lines_;
  std::set<ServerId> lost_;
  std::map<SliceIndex, ServerId> askedAt_;
  bool hasLost_ = false;
  bool registered_ = false;
  std::uint32_t map_ = 0;
  Registration registration_;
  std::vector<SliceOwners> places_;
  std::deque<GivenRules> rules_;
  RulesNumber rulesGiven_ = 0;
};

} // namespace hvd_order::test
