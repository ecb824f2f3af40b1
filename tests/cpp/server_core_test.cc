#include "servers/server_core.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "server_world.h"

namespace hvd_order {

namespace {

using test::floatsOf;
using test::payloadOf;
using test::RecordingLink;
using test::server;
using test::SimulatedWorker;
using test::worker;
using test::World;

constexpr ModelId kModel = SimulatedWorker::kModel;

std::span<const std::byte> bytesOf(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

// ------------------------------------------------------------------------- whole jobs, simulated

struct Scenario {
  int workers = 3;
  int servers = 3;
  SliceIndex slices = 2;
  Round rounds = 6;
  bool serversUpdate = true;
  Consistency consistency = Consistency::kSynchronous;
  Round staleness = ~Round{0};
  std::optional<Round> delay = std::nullopt;
  bool aggregates = false;
  double bound = 0;
  bool replicas = false;
  int maps = 0;        // changes besides those that a loss or a new server needs
  bool loss = false;   // of one server, at any moment
  bool lives = false;  // that one: it was silent for too long, and goes on
  bool joins = false;  // one server comes later
  bool leaves = false; // one server is emptied and goes
};

class Job {
 public:
  Job(const Scenario& scenario, std::uint64_t seed) : is_(scenario), world_(seed) {
    world_.onSend = [this](Peer from, Peer to, const FrameHeader& header, const Payload& payload) {
      sent(from, to, header, payload);
    };
    world_.onDelivery = [this](Peer from, Peer to, const FrameHeader& header) {
      delivered(from, to, header);
    };
    world_.onLost = [this](Peer at, Peer gone) {
      std::erase_if(unsafe_, [&](const auto& entry) {
        return entry.first.first == at && entry.second.follower == gone;
      });
    };
    for (int number = 0; number < is_.servers; ++number) {
      addServer(number);
      for (int other = 0; other < number; ++other) {
        joinServers(number, other);
      }
    }
    for (int rank = 0; rank < is_.workers; ++rank) {
      workers_.push_back(
          std::make_unique<SimulatedWorker>(
              rank, [this, rank](SliceIndex slice, Round round, const Payload& value) {
                answered(rank, slice, round, floatsOf(value));
              }));
      workers_.back()->asksFirst = is_.delay.has_value();
      for (int number = 0; number < is_.servers; ++number) {
        joinWorker(rank, number);
      }
      step_.push_back(0);
      isRegistered_.push_back(false);
    }
    workers_[0]->onLost = [this](ServerId gone) { noticed_.push_back(gone); };
    for (int number = 0; number < is_.servers; ++number) {
      alive_.insert(number);
      usable_.insert(number);
    }
    for (SliceIndex slice = 0; slice < is_.slices; ++slice) {
      places_.push_back({someServer(), kNoServer});
      registration_.slices.push_back(
          {static_cast<std::uint32_t>(width() * sizeof(float)), ElementType::kFloat32, {}});
      if (is_.serversUpdate) {
        registration_.slices.back().segments = {
            {0, static_cast<std::uint32_t>(is_.workers), 0},
            {static_cast<std::uint32_t>(is_.workers), 2, 1}};
      }
    }
    registration_.serversUpdate = is_.serversUpdate;
    chooseReplicas();
    firstPlaces_ = places_;
    lastSeen_.assign(is_.slices, std::vector<float>(width(), 0));
    makeReference();
    if (is_.serversUpdate) {
      for (std::uint32_t part = 0; part < 3; ++part) {
        for (SliceIndex slice = 0; slice < is_.slices; ++slice) {
          toBegin_.emplace_back(slice, part);
        }
      }
    }
    if (is_.joins) {
      for (int peer = 0; peer < is_.workers + is_.servers; ++peer) {
        toJoin_.push_back(peer);
      }
    }
    tillLoss_ = static_cast<int>(world_.below(200));
  }

  void run() {
    for (int calls = 0; !isDone(); ++calls) {
      CHECK(calls < 200'000);
      const bool acted = world_.chance(0.3) && act();
      if (!acted && !world_.step() && !actNow()) {
        throw test::Failure(concat("nothing moves any more: ", state()));
      }
    }
    while (world_.step()) {
    }
    checkEnd();
  }
  int sums() const {
    return sums_;
  }

 private:
  std::size_t width() const {
    return static_cast<std::size_t>(is_.workers) + 3;
  }
  bool isPlain() const { // updates that commute, with a norm that is easily said
    return is_.bound > 0 || is_.consistency == Consistency::kAsynchronous;
  }

  std::vector<float> gradient(int rank, SliceIndex slice, Round round) const {
    std::vector<float> values(width(), 0);
    values[static_cast<std::size_t>(rank)] = is_.serversUpdate ? 1 : static_cast<float>(round);
    if (!isPlain()) {
      std::mt19937 numbers(round * 1000U + slice * 100U + static_cast<unsigned>(rank));
      for (std::size_t i = static_cast<std::size_t>(is_.workers); i < width(); ++i) {
        values[i] = static_cast<float>(numbers()) / 1e9F - 2;
      }
    }
    return values;
  }

  std::vector<UpdateRule> rules(Round round) const {
    UpdateRule first{.kind = RuleKind::kSgd, .lr = 1};
    UpdateRule second{.kind = RuleKind::kSgd, .lr = 0.1};
    if (!isPlain()) {
      second.lr = 0.1 / (1.0 + round / 2);
      second.momentum = 0.9;
    }
    return {first, second};
  }

  std::vector<float> begun(SliceIndex slice, std::uint32_t part) const {
    std::vector<float> values(width(), 0);
    values[width() - 2] = static_cast<float>(slice + part);
    return values;
  }

  // What one process that has all gradients comes to.
  void makeReference() {
    for (SliceIndex slice = 0; slice < is_.slices; ++slice) {
      std::vector<float> value = begun(slice, 1);
      std::vector<float> moment = begun(slice, 2);
      auto& after = reference_.emplace_back();
      after.push_back(value);
      for (Round round = 1; round <= is_.rounds; ++round) {
        std::vector<std::vector<float>> all;
        std::vector<const std::byte*> inputs;
        for (int rank = 0; rank < is_.workers; ++rank) {
          all.push_back(gradient(rank, slice, round));
        }
        for (const auto& each : all) {
          inputs.push_back(bytesOf(each).data());
        }
        std::vector<float> total(width());
        sum(ElementType::kFloat32, inputs, std::as_writable_bytes(std::span(total)).data(),
            total.size() * sizeof(float));
        if (is_.serversUpdate) {
          const auto both = rules(round);
          const auto n = static_cast<std::size_t>(is_.workers);
          const std::span<float> values(value);
          const std::span<const float> slope(total);
          apply(both[0], kStepsBefore + round, slope.first(n), values.first(n), {});
          std::vector<std::span<float>> moments(
              momentsOf(both[1]), std::span(moment).subspan(n, 2));
          apply(both[1], kStepsBefore + round, slope.subspan(n, 2), values.subspan(n, 2), moments);
          value.back() = total.back();
        } else {
          value = total;
        }
        after.push_back(value);
      }
    }
  }

  // ---- who is there

  void addServer(int number) {
    ServerOptions options;
    options.server = static_cast<ServerId>(number);
    options.workers = is_.workers;
    options.consistency = is_.consistency;
    options.staleness = is_.staleness;
    options.delayBound = is_.delay;
    options.aggregates = is_.aggregates;
    options.clock = [this] { return time_ += 1 + static_cast<double>(world_.below(100)); };
    options.divergenceBound = is_.bound;
    options.ordered = true;
    options.log = [this, number](const std::string& line) {
      throw test::Failure(concat("server ", number, " ", line));
    };
    options.wasAway = [this, number] { return number == lostServer_; };
    cores_[number] = std::make_shared<ServerCore>(options);
  }
  void joinServers(int a, int b) {
    cores_[a]->connect(server(b), world_.end(server(a), server(b)));
    cores_[b]->connect(server(a), world_.end(server(b), server(a)));
  }
  void joinWorker(int rank, int number) {
    cores_[number]->connect(worker(rank), world_.end(server(number), worker(rank)));
    workers_[static_cast<std::size_t>(rank)]->connect(
        static_cast<ServerId>(number), world_.end(worker(rank), server(number)));
  }
  ServerId someServer() {
    auto at = usable_.begin();
    std::advance(at, world_.below(usable_.size()));
    return static_cast<ServerId>(*at);
  }

  // ---- what happens besides frames

  bool act() {
    if (is_.loss && beganEverywhere() && tillLoss_ >= 0 && tillLoss_-- == 0 && alive_.size() > 1) {
      auto at = alive_.begin();
      std::advance(at, world_.below(alive_.size()));
      if (is_.lives) {
        workers_[0]->giveUp(static_cast<ServerId>(*at));
      } else {
        world_.kill(server(*at));
      }
      lostServer_ = *at;
      alive_.erase(at);
      return true;
    }
    switch (world_.below(8)) {
      case 0:
        return registerSome() || beginSome();
      case 1:
        return changeMap();
      case 2:
        return world_.chance(0.2) && noticeLoss();
      case 3:
        return joinSome() || letGo();
      default:
        return issueSome();
    }
  }

  bool actNow() {
    return registerSome() || beginSome() || noticeLoss() || joinSome() || letGo() || issueAny();
  }

  bool registerSome() {
    for (int rank = 0; rank < is_.workers; ++rank) {
      if (!isRegistered_[static_cast<std::size_t>(rank)]) {
        isRegistered_[static_cast<std::size_t>(rank)] = true;
        workers_[static_cast<std::size_t>(rank)]->setBuffers(registration_, firstPlaces_);
        return true;
      }
    }
    return false;
  }

  bool beginSome() {
    if (toBegin_.empty() || !isRegistered_[0]) {
      return false;
    }
    const auto [slice, part] = toBegin_.front();
    toBegin_.pop_front();
    if (part == 0) {
      ByteWriter counters;
      counters.put(kStepsBefore);
      for (int number = 0; number < 2 * is_.workers; ++number) {
        counters.put(Round{0});
      }
      workers_[0]->begin(slice, 0, 3, payloadOf(counters.bytes()));
    } else {
      workers_[0]->begin(slice, part, 3, payloadOf(begun(slice, part)));
    }
    return true;
  }

  bool changeMap() {
    if (mapsDone_ >= is_.maps || !isRegistered_[0] || !world_.chance(0.15)) {
      return false;
    }
    ++mapsDone_;
    for (SliceOwners& place : places_) {
      if (world_.chance(0.6)) {
        place.owner = someServer();
      }
      if (world_.chance(0.3)) {
        place.replica = kNoServer;
      }
    }
    sendMap();
    return true;
  }

  void chooseReplicas() {
    for (SliceOwners& place : places_) {
      if (!is_.replicas || usable_.size() < 2) {
        place.replica = kNoServer;
        continue;
      }
      while (place.replica == kNoServer || place.replica == place.owner ||
             !usable_.contains(place.replica)) {
        place.replica = someServer();
      }
    }
  }
  void sendMap() {
    chooseReplicas();
    workers_[0]->setMap(places_);
  }

  bool noticeLoss() {
    if (noticed_.empty() || !isRegistered_[0]) {
      return false;
    }
    const ServerId gone = noticed_.back();
    noticed_.pop_back();
    if (usable_.erase(gone) == 0) {
      return true; // it was told to go
    }
    for (SliceOwners& place : places_) {
      if (place.owner == gone) {
        place.owner = place.replica;
        place.replica = kNoServer;
      }
    }
    sendMap();
    return true;
  }

  bool joinSome() {
    if (toJoin_.empty()) {
      return false;
    }
    const int number = is_.servers;
    if (!cores_.contains(number)) {
      addServer(number);
      alive_.insert(number);
    }
    if (!alive_.contains(number)) {
      toJoin_.clear();
      return true;
    }
    const auto at = toJoin_.begin() + static_cast<std::ptrdiff_t>(world_.below(toJoin_.size()));
    const int peer = *at;
    toJoin_.erase(at);
    if (peer < is_.workers) {
      joinWorker(peer, number);
    } else if (alive_.contains(peer - is_.workers)) {
      joinServers(number, peer - is_.workers);
    }
    if (toJoin_.empty()) {
      usable_.insert(number);
    }
    return true;
  }

  bool letGo() {
    if (!is_.leaves || !isRegistered_[0] || (is_.joins && !toJoin_.empty())) {
      return false;
    }
    if (leaving_ < 0) {
      if (usable_.size() < 3 || !world_.chance(0.02)) {
        return false;
      }
      leaving_ = someServer();
      usable_.erase(leaving_);
      for (SliceOwners& place : places_) {
        if (place.owner == leaving_) {
          place.owner = someServer();
        }
      }
      sendMap();
      return true;
    }
    // The audit takes its way, and is asked for behind the map.
    if (alive_.contains(leaving_) && emptied() && world_.chance(0.1)) {
      world_.kill(server(leaving_));
      alive_.erase(leaving_);
      return true;
    }
    return false;
  }
  bool emptied() const {
    const auto held = cores_.at(leaving_)->audit();
    return held.empty() && beganEverywhere();
  }
  bool beganEverywhere() const { // else its state may still be on the way
    return std::all_of(lastSeen_.begin(), lastSeen_.end(), [](const auto& value) {
      return std::any_of(value.begin(), value.end(), [](float number) { return number != 0; });
    });
  }

  bool issueSome() {
    return issue(static_cast<int>(world_.below(static_cast<std::size_t>(is_.workers))));
  }
  bool issueAny() {
    for (int rank = 0; rank < is_.workers; ++rank) {
      if (issue(rank)) {
        return true;
      }
    }
    return false;
  }
  // Pushes some slice of the worker's step.
  bool issue(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    SimulatedWorker& who = *workers_[index];
    if (!isRegistered_[index] || (rank == 0 && !toBegin_.empty())) {
      return false;
    }
    Round& step = step_[index];
    if (std::all_of(who.rounds.begin(), who.rounds.end(), [&](Round r) { return r == step; })) {
      if (step == is_.rounds) {
        return false;
      }
      ++step;
      if (rank == 0 && is_.serversUpdate && (step == 1 || rules(step) != rules(step - 1))) {
        // Thinks better of it; pushes of others may be made by it before, if they do not wait.
        if (is_.consistency == Consistency::kSynchronous && world_.chance(0.5)) {
          who.setRules({{.kind = RuleKind::kSgd, .lr = 7}, {.kind = RuleKind::kSgd, .lr = 7}});
        }
        who.setRules(rules(step));
      }
    }
    std::vector<SliceIndex> free;
    for (SliceIndex slice = 0; slice < is_.slices; ++slice) {
      if (who.rounds[slice] < step && !who.underWay[slice]) {
        free.push_back(slice);
      }
    }
    if (free.empty()) {
      return false;
    }
    const SliceIndex slice = free[world_.below(free.size())];
    who.issue(slice, payloadOf(gradient(rank, slice, step)));
    return true;
  }

  // ---- what must hold

  void answered(int rank, SliceIndex slice, Round round, const std::vector<float>& value) {
    CHECK_EQUAL(value.size(), width());
    lastSeen_[slice] = value;
    lastSeen_[slice].back() += 1; // it has been seen
    if (is_.delay) {
      return checkDelay(rank, slice, round, value);
    }
    if (is_.consistency == Consistency::kSynchronous && is_.bound == 0) {
      CHECK_EQUAL(value, reference_[slice][round]);
      return;
    }
    float slowest = 1e9F;
    for (int other = 0; other < is_.workers; ++other) {
      const float applied = -value[static_cast<std::size_t>(other)];
      slowest = std::min(slowest, applied);
      CHECK(
          applied <= static_cast<float>(workers_[static_cast<std::size_t>(other)]->rounds[slice]));
      if (other == rank && is_.bound == 0) {
        CHECK_EQUAL(applied, static_cast<float>(round));
      }
    }
    if (is_.consistency == Consistency::kAsynchronous && is_.bound == 0 &&
        is_.staleness != ~Round{0}) {
      CHECK(static_cast<float>(round) <= slowest + static_cast<float>(is_.staleness));
    }
  }

  // A worker's own number counts its updates, so together they count all.
  void checkDelay(int rank, SliceIndex slice, Round round, const std::vector<float>& value) {
    const SimulatedWorker& who = *workers_[static_cast<std::size_t>(rank)];
    const float made = -value[static_cast<std::size_t>(rank)];
    CHECK_EQUAL(made, static_cast<float>(round - who.late[slice]));
    const bool isToldAtOnce = is_.maps == 0 && !is_.replicas && is_.staleness == ~Round{0};
    const std::uint64_t before = std::max(who.readBefore[slice], kStepsBefore);
    if (isToldAtOnce && who.late[slice] == lateBefore_[{rank, slice}]) {
      // What came with it in one sum has been seen as well.
      const std::uint64_t together = is_.aggregates ? static_cast<std::uint64_t>(is_.workers) : 1;
      CHECK(who.read[slice] - together <= before + *is_.delay);
    }
    lateBefore_[{rank, slice}] = who.late[slice];
  }

  // What a server has sent and its follower has not confirmed.
  struct Unsafe {
    Peer follower;
    std::optional<std::uint32_t> stateOfMap;
    std::map<Round, double> updates; // by version
  };

  void sent(Peer from, Peer to, const FrameHeader& header, const Payload& payload) {
    if (from.kind != PeerKind::kServer) {
      return;
    }
    if (header.kind == FrameKind::kPush && (header.flags & kFrameFlagGroup) != 0) {
      ++sums_;
    }
    const std::pair key{from, header.slice};
    if (lostServer_ >= 0 && header.kind == FrameKind::kReplicaDone &&
        (header.argument & kSafeMark) != 0) {
      unsafe_.erase(key); // its replica is to be the one that is lost
    } else if (header.kind == FrameKind::kState) {
      unsafe_.erase(key);
      if (StateArgument::of(header).isCopy) {
        unsafe_[key] = {to, header.map, {}};
      }
    } else if (header.kind == FrameKind::kReplica) {
      double squares = 0;
      for (const float number : floatsOf(payload)) {
        squares += double{number} * number;
      }
      unsafe_[key].follower = to;
      unsafe_[key].updates[ReplicaArgument::of(header).version] = std::sqrt(squares);
    } else if (
        header.kind == FrameKind::kValue && payload.sizeBytes > 0 && !relays_ &&
        unsafe_.contains(key)) {
      const Unsafe& open = unsafe_.at(key);
      CHECK(!open.stateOfMap);
      double lag = 0;
      for (const auto& [version, norm] : open.updates) {
        lag += norm;
      }
      CHECK(is_.bound > 0 ? lag <= is_.bound + 1e-6 : open.updates.empty());
    }
  }

  void delivered(Peer from, Peer to, const FrameHeader& header) {
    relays_ = header.kind == FrameKind::kValue; // a helper passes on what its owner may tell
    const auto open = unsafe_.find({to, header.slice});
    if (header.kind != FrameKind::kReplicaDone || open == unsafe_.end() ||
        open->second.follower != from) {
      return;
    }
    if (StateArgument::of(header).isCopy) {
      if (open->second.stateOfMap == header.map) {
        open->second.stateOfMap.reset();
      }
    } else {
      auto& updates = open->second.updates;
      updates.erase(updates.begin(), updates.upper_bound(ReplicaArgument::of(header).version));
    }
  }

  bool isDone() const {
    if (!noticed_.empty() || (lostServer_ >= 0 && usable_.contains(lostServer_))) {
      return false;
    }
    for (const auto& who : workers_) {
      if (who->rounds.empty()) {
        return false;
      }
      for (SliceIndex slice = 0; slice < is_.slices; ++slice) {
        if (who->rounds[slice] < is_.rounds || who->underWay[slice]) {
          return false;
        }
      }
    }
    return true;
  }

  // Owner and replica have it all, nobody else has anything.
  void checkEnd() {
    std::map<SliceIndex, std::vector<std::pair<int, ServerCore::AuditedSlice>>> holders;
    for (const int number : alive_) {
      for (const auto& held : cores_[number]->audit()) {
        holders[held.slice].emplace_back(number, held);
      }
    }
    for (SliceIndex slice = 0; slice < is_.slices; ++slice) {
      const SliceOwners& place = places_[slice];
      const auto& those = holders[slice];
      CHECK_EQUAL(those.size(), place.replica == kNoServer ? 1U : 2U);
      for (const auto& [number, held] : those) {
        CHECK(number == place.owner || number == place.replica);
        CHECK_EQUAL(held.owned, number == place.owner);
        CHECK_EQUAL(held.version, those.front().second.version);
        CHECK_EQUAL(held.checksum, those.front().second.checksum);
      }
      if (is_.delay) {
        checkUpdates(slice, those.front().second);
        continue;
      }
      if (is_.bound == 0) {
        const bool isWhole = is_.consistency == Consistency::kSynchronous;
        CHECK_EQUAL(
            those.front().second.version,
            is_.rounds * (isWhole ? 1 : static_cast<Round>(is_.workers)));
      }
      std::vector<float> all = reference_[slice].back();
      if (is_.bound == 0) {
        CHECK_EQUAL(those.front().second.checksum, crc32c(bytesOf(all)));
      } else {
        double squares = 0;
        for (int rank = 0; rank < is_.workers; ++rank) {
          const auto at = static_cast<std::size_t>(rank);
          const double missing = double{lastSeen_[slice][at]} - all[at];
          CHECK(is_.consistency == Consistency::kAsynchronous || missing >= 0);
          squares += missing * missing;
        }
        CHECK(
            is_.consistency == Consistency::kAsynchronous ||
            std::sqrt(squares) <= (is_.loss ? is_.bound : 0) + 1e-6);
      }
    }
  }

  // Every update is there once, but those that were late.
  void checkUpdates(SliceIndex slice, const ServerCore::AuditedSlice& held) {
    std::vector<float> all = begun(slice, 1);
    Round version = 0;
    for (int rank = 0; rank < is_.workers; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      const Round made = is_.rounds - workers_[index]->late[slice];
      all[index] = static_cast<float>(-static_cast<int>(made));
      version += made;
    }
    CHECK_EQUAL(held.version, version);
    CHECK_EQUAL(held.checksum, crc32c(bytesOf(all)));
  }

  std::string state() const {
    std::string text;
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      for (SliceIndex slice = 0; slice < workers_[rank]->underWay.size(); ++slice) {
        if (const auto& open = workers_[rank]->underWay[slice]) {
          text += concat("worker ", rank, " waits for ", slice, " round ", open->round, "; ");
        }
      }
    }
    for (const int number : alive_) {
      for (const auto& held : cores_.at(number)->audit()) {
        text += concat(
            "server ", number, held.owned ? " owns " : " has ", held.slice, " version ",
            held.version, "; ");
      }
    }
    for (const SliceOwners& place : places_) {
      text += concat("place ", place.owner, ",", place.replica, "; ");
    }
    return text;
  }

  static constexpr std::uint64_t kStepsBefore = 5;

  const Scenario is_;
  World world_;
  double time_ = 0;
  int sums_ = 0;
  bool relays_ = false;
  std::map<std::pair<int, SliceIndex>, Round> lateBefore_;
  std::map<int, std::shared_ptr<ServerCore>> cores_;
  std::vector<std::unique_ptr<SimulatedWorker>> workers_;
  std::vector<Round> step_;
  std::vector<bool> isRegistered_;
  Registration registration_;
  std::vector<SliceOwners> firstPlaces_;
  std::vector<std::vector<std::vector<float>>> reference_; // by slice and round
  std::vector<std::vector<float>> lastSeen_;
  std::deque<std::pair<SliceIndex, std::uint32_t>> toBegin_;
  std::map<std::pair<Peer, SliceIndex>, Unsafe> unsafe_;

  // The coordinator's
  std::vector<SliceOwners> places_;
  std::set<int> usable_;
  std::vector<ServerId> noticed_;
  int mapsDone_ = 0;

  std::set<int> alive_;
  std::vector<int> toJoin_;
  int tillLoss_ = -1;
  int lostServer_ = -1;
  int leaving_ = -1;
};

// Returns how many sums of several updates came from helpers.
int simulate(const Scenario& scenario, int schedules) {
  int sums = 0;
  for (int seed = 0; seed < schedules; ++seed) {
    try {
      Job job(scenario, static_cast<std::uint64_t>(seed));
      job.run();
      sums += job.sums();
    } catch (const std::exception& error) {
      throw test::Failure(concat("seed ", seed, ": ", error.what()));
    }
  }
  return sums;
}

} // namespace

TEST(aRoundIsSummedOnceInRankOrder) {
  simulate({.serversUpdate = false}, 500);
  simulate({.workers = 1, .servers = 1, .serversUpdate = false}, 50);
}

TEST(updatesAreThoseOfOneProcess) {
  simulate({}, 500);
}

TEST(slicesMoveWithoutLoss) {
  simulate({.serversUpdate = false, .maps = 6}, 1500);
  simulate({.maps = 6}, 1500);
  simulate({.rounds = 4, .maps = 30}, 500);
}

TEST(asynchronousUpdatesAreAppliedOnceEach) {
  simulate({.consistency = Consistency::kAsynchronous, .maps = 6}, 1500);
  simulate({.consistency = Consistency::kAsynchronous, .staleness = 0, .maps = 4}, 500);
  simulate({.consistency = Consistency::kAsynchronous, .staleness = 2, .maps = 4}, 500);
}

TEST(delayedUpdatesAreNeverMadeAndTheOthersOnce) {
  constexpr auto kAsync = Consistency::kAsynchronous;
  for (const Round delay : {0U, 1U, 2U, 5U}) {
    simulate({.consistency = kAsync, .delay = delay}, 250);
    simulate({.workers = 6, .consistency = kAsync, .delay = delay}, 150);
    simulate({.consistency = kAsync, .delay = delay, .maps = 6}, 350);
    simulate(
        {.consistency = kAsync, .staleness = 1, .delay = delay, .replicas = true, .maps = 6}, 250);
    simulate(
        {.consistency = kAsync, .delay = delay, .replicas = true, .maps = 2, .loss = true}, 350);
    simulate(
        {.servers = 4,
         .consistency = kAsync,
         .delay = delay,
         .replicas = true,
         .maps = 4,
         .joins = true,
         .leaves = true},
        150);
  }
}

TEST(whatHelpersAddUpIsMadeOnce) {
  const Scenario plain{
      .workers = 5, .consistency = Consistency::kAsynchronous, .delay = 8, .aggregates = true};
  const auto some = [&](const std::function<void(Scenario&)>& change, int schedules) {
    Scenario scenario = plain;
    change(scenario);
    CHECK(simulate(scenario, schedules) > schedules);
  };
  some([](Scenario& is) { is.slices = 3; }, 400);
  some([](Scenario& is) { is.delay = 3; }, 300);
  some([](Scenario& is) { is.staleness = 1; }, 300);
  some([](Scenario& is) { is.maps = 6; }, 500);
  some([](Scenario& is) { is.replicas = true, is.staleness = 1, is.maps = 6; }, 300);
  some([](Scenario& is) { is.servers = 4, is.replicas = is.loss = true, is.maps = 2; }, 800);
  some(
      [](Scenario& is) {
        is.servers = 4, is.maps = 4;
        is.replicas = is.joins = is.leaves = true;
      },
      300);
}

TEST(replicasHaveWhatIsAnswered) {
  simulate({.serversUpdate = false, .replicas = true, .maps = 6}, 1000);
  simulate({.replicas = true, .maps = 6}, 1000);
  simulate(
      {.consistency = Consistency::kAsynchronous, .staleness = 1, .replicas = true, .maps = 6},
      1000);
}

TEST(replicasLagByNoMoreThanTheBound) {
  simulate({.bound = 4, .replicas = true, .maps = 6}, 1000);
  simulate(
      {.consistency = Consistency::kAsynchronous, .bound = 2.5, .replicas = true, .maps = 6}, 1000);
}

TEST(aServerIsLostAndReplicasTakeOver) {
  simulate({.serversUpdate = false, .replicas = true, .loss = true}, 1500);
  simulate({.replicas = true, .loss = true}, 1500);
  simulate({.servers = 2, .replicas = true, .loss = true}, 1000); // none is left for a replica
  simulate(
      {.consistency = Consistency::kAsynchronous, .staleness = 1, .replicas = true, .loss = true},
      1500);
}

TEST(aServerThatWasGivenUpAndLivesIsNotBelieved) {
  simulate({.serversUpdate = false, .replicas = true, .loss = true, .lives = true}, 1000);
  simulate({.replicas = true, .maps = 2, .loss = true, .lives = true}, 2000);
  simulate({.bound = 4, .replicas = true, .maps = 2, .loss = true, .lives = true}, 1000);
  simulate(
      {.consistency = Consistency::kAsynchronous,
       .replicas = true,
       .maps = 2,
       .loss = true,
       .lives = true},
      1000);
}

TEST(aServerIsLostWhileSlicesMove) {
  simulate({.serversUpdate = false, .replicas = true, .maps = 2, .loss = true}, 2000);
  simulate({.replicas = true, .maps = 2, .loss = true}, 2000);
  simulate(
      {.consistency = Consistency::kAsynchronous, .replicas = true, .maps = 2, .loss = true}, 2000);
}

TEST(aLossLosesNoMoreThanTheBound) {
  simulate({.bound = 4, .replicas = true, .maps = 2, .loss = true}, 2000);
  simulate(
      {.consistency = Consistency::kAsynchronous,
       .bound = 2.5,
       .replicas = true,
       .maps = 2,
       .loss = true},
      1000);
}

TEST(serversComeAndGo) {
  simulate({.maps = 6, .joins = true}, 1000);
  simulate({.servers = 4, .replicas = true, .maps = 4, .joins = true, .leaves = true}, 1000);
  simulate(
      {.servers = 4, .serversUpdate = false, .replicas = true, .maps = 4, .leaves = true}, 1000);
}

// ---------------------------------------------------------------------------- one server, by hand

namespace {

/// A server with connections that keep what it sends.
class Desk {
 public:
  explicit Desk(ServerOptions options) {
    options.log = [this](const std::string& line) {
      const std::scoped_lock lock(mutex_);
      refused_.push_back(line);
    };
    core = std::make_shared<ServerCore>(options);
  }
  void connect(Peer peer) {
    core->connect(peer, connections_[peer] = std::make_shared<RecordingLink>());
  }
  void say(Peer from, FrameHeader header, const Payload& payload = {}) {
    header.payloadBytes = payload.sizeBytes;
    connections_.at(from)->frame(header, payload);
  }
  std::vector<test::Sent> sentTo(Peer peer, FrameKind kind) {
    auto sent = connections_.at(peer)->taken();
    std::erase_if(sent, [&](const test::Sent& each) { return each.header.kind != kind; });
    return sent;
  }
  std::vector<std::string> refused() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(refused_, {});
  }

  std::shared_ptr<ServerCore> core;

 private:
  std::map<Peer, std::shared_ptr<RecordingLink>> connections_;
  std::mutex mutex_;
  std::vector<std::string> refused_;
};

FrameHeader frame(FrameKind kind, Round round = 0, SliceIndex slice = 0) {
  return {.kind = kind, .model = kModel, .slice = slice, .round = round};
}

FrameHeader rulesFrom(Round since) {
  FrameHeader header = frame(FrameKind::kRule, since);
  header.argument = since; // their number
  return header;
}

Payload modelOf(bool serversUpdate, SliceIndex slices = 1) {
  Registration made{.serversUpdate = serversUpdate, .slices = {}};
  for (SliceIndex slice = 0; slice < slices; ++slice) {
    made.slices.push_back({8, ElementType::kFloat32, {}});
    if (serversUpdate) {
      made.slices.back().segments = {{0, 2, 0}};
    }
  }
  return payloadOf(writeRegistration(made));
}

Payload ownedBy(ServerId server, SliceIndex slices = 1) {
  return payloadOf(writeOwners(std::vector<SliceOwners>(slices, {server, kNoServer})));
}

void registerAt(Desk& desk, int workers, bool serversUpdate, SliceIndex slices = 1) {
  for (int rank = 0; rank < workers; ++rank) {
    desk.connect(worker(rank));
    desk.say(worker(rank), frame(FrameKind::kModel), modelOf(serversUpdate, slices));
    desk.say(worker(rank), frame(FrameKind::kMap), ownedBy(0, slices));
  }
}

void beginAt(Desk& desk, int workers, std::uint64_t stepsBefore = 0) {
  ByteWriter counters;
  counters.put(stepsBefore);
  for (int number = 0; number < 2 * workers; ++number) {
    counters.put(Round{0});
  }
  FrameHeader state = frame(FrameKind::kState);
  state.argument = StateArgument{2, kCountersPart}.packed();
  desk.say(worker(0), state, payloadOf(counters.bytes()));
  state.argument = StateArgument{2, kValuePart}.packed();
  desk.say(worker(0), state, payloadOf(std::vector<float>{10, 20}));
}

Payload sgd(double lr) {
  return payloadOf(writeRules(std::vector<UpdateRule>{{.kind = RuleKind::kSgd, .lr = lr}}));
}

} // namespace

TEST(aPushThatComesTwiceCountsOnceAndIsAnswered) {
  Desk desk({.workers = 2});
  registerAt(desk, 2, false);
  desk.say(worker(1), frame(FrameKind::kPush, 1), payloadOf(std::vector<float>{1, 2}));
  desk.say(worker(1), frame(FrameKind::kPush, 1), payloadOf(std::vector<float>{1, 2}));
  CHECK(desk.core->lateWorkers() == std::set<int>{0});
  desk.say(worker(0), frame(FrameKind::kPush, 1), payloadOf(std::vector<float>{3, 4}));
  for (const int rank : {0, 1}) {
    const auto answers = desk.sentTo(worker(rank), FrameKind::kValue);
    CHECK_EQUAL(answers.size(), 1U);
    CHECK_EQUAL(floatsOf(answers[0].payload), std::vector<float>{4, 6});
  }
  CHECK(desk.core->lateWorkers().empty());
  desk.say(worker(1), frame(FrameKind::kPush, 1), payloadOf(std::vector<float>{1, 2}));
  const auto again = desk.sentTo(worker(1), FrameKind::kValue);
  CHECK_EQUAL(again.size(), 1U);
  CHECK_EQUAL(again[0].header.round, 1U);
  CHECK_EQUAL(floatsOf(again[0].payload), std::vector<float>{4, 6});
  CHECK(desk.refused().empty());
}

TEST(aLateWorkerIsToldOfANewerMap) {
  Desk desk({.workers = 2});
  registerAt(desk, 1, false);
  FrameHeader map = frame(FrameKind::kMap);
  map.map = 4;
  desk.say(worker(0), map, ownedBy(1));
  desk.connect(worker(1));
  desk.say(worker(1), frame(FrameKind::kModel), modelOf(false));
  desk.say(worker(1), frame(FrameKind::kMap), ownedBy(0));
  const auto told = desk.sentTo(worker(1), FrameKind::kMap);
  CHECK_EQUAL(told.size(), 1U);
  CHECK_EQUAL(told[0].header.map, 4U);
}

TEST(rulesOlderThanThoseKeptAreReplacedByTheOldest) {
  Desk desk({.workers = 2, .consistency = Consistency::kAsynchronous});
  registerAt(desk, 2, true);
  beginAt(desk, 2);
  for (Round since = 1; since <= 100; ++since) {
    desk.say(worker(0), rulesFrom(since), sgd(1));
  }
  desk.say(worker(1), frame(FrameKind::kPush, 1), payloadOf(std::vector<float>{1, 2}));
  const auto answers = desk.sentTo(worker(1), FrameKind::kValue);
  CHECK_EQUAL(answers.size(), 1U);
  CHECK_EQUAL(floatsOf(answers[0].payload), std::vector<float>{9, 18});
}

TEST(whatNoHonestPeerSendsIsRefusedAndTheRestGoesOn) {
  Desk desk({.workers = 2, .largestSlice = 1024});
  registerAt(desk, 2, true);
  desk.connect(server(1));
  desk.connect({PeerKind::kObserver, 0});
  beginAt(desk, 2);
  desk.say(worker(0), rulesFrom(1), sgd(1));
  CHECK(desk.refused().empty());
  const Payload good = payloadOf(std::vector<float>{1, 1});
  const auto refuses = [&](Peer from, const FrameHeader& header, const Payload& payload = {}) {
    desk.say(from, header, payload);
    const auto lines = desk.refused();
    CHECK_EQUAL(lines.size(), 1U);
    CHECK_CONTAINS(lines[0], "refused a frame of " + nameOf(from));
  };
  constexpr std::uint32_t kMost = ~std::uint32_t{0};
  const auto bad = [](UpdateRule rule) {
    return payloadOf(writeRules(std::vector<UpdateRule>{rule}));
  };
  refuses(worker(0), rulesFrom(1), bad({.lr = -1}));
  refuses(worker(0), rulesFrom(1), bad({.lr = std::nan("")}));
  refuses(worker(0), rulesFrom(1), bad({.kind = RuleKind::kAdam, .beta1 = 1}));
  refuses(worker(0), rulesFrom(1)); // no rule for group 0
  refuses(worker(1), rulesFrom(1), sgd(1));
  refuses(worker(0), rulesFrom(0), sgd(1));
  refuses(worker(0), frame(FrameKind::kPush, 0), good);
  refuses(worker(0), frame(FrameKind::kPush, 1, 1), good);
  refuses(worker(0), frame(FrameKind::kPush, 1, kMost), good);
  refuses(worker(0), frame(FrameKind::kPush, 1), payloadOf(std::vector<float>{1}));
  refuses(worker(0), frame(FrameKind::kPush, 1));
  refuses({PeerKind::kObserver, 0}, frame(FrameKind::kPush, 1), good);
  refuses({PeerKind::kObserver, 0}, frame(FrameKind::kMap, 1), ownedBy(1));
  refuses(worker(0), frame(FrameKind::kMap), ownedBy(0, 2));
  refuses(worker(0), frame(FrameKind::kMap), ownedBy(kNoServer));
  refuses(worker(0), frame(FrameKind::kPull)); // of part 0
  refuses(worker(0), frame(FrameKind::kValue));
  refuses(server(1), frame(FrameKind::kValue),
          good); // is for workers, but for a group's
  const auto ofGroup = [](FrameKind kind, GroupArgument group) {
    FrameHeader header = frame(kind, 1);
    header.flags = kFrameFlagGroup;
    header.argument = group.packed();
    return header;
  };
  refuses(worker(0), ofGroup(FrameKind::kPush, {1, 2, 1}), payloadOf(std::vector<float>{1}));
  refuses(worker(0), ofGroup(FrameKind::kPush, {1, 1, 1}), good);
  refuses(worker(0), ofGroup(FrameKind::kPush, {1, 3, 1}), good);
  refuses(worker(0), ofGroup(FrameKind::kPush, {0, 2, 1}),
          good); // this server's own slice
  for (const auto& members : std::vector<std::vector<Member>>{
           {{0, 1}}, {{1, 1}, {0, 1}}, {{0, 1}, {0, 1}}, {{0, 1}, {2, 1}}, {{0, 1}, {1, 0}}}) {
    refuses(server(1), ofGroup(FrameKind::kPush, {}), withMembers(good, members));
    refuses(server(1), ofGroup(FrameKind::kReplica, {}), withMembers(good, members));
  }
  refuses(server(1), ofGroup(FrameKind::kPush, {}), good);
  refuses(worker(0), frame(FrameKind::kReplica, 1), good);
  refuses(server(1), frame(FrameKind::kModel), modelOf(false));
  refuses(worker(1), frame(FrameKind::kModel), modelOf(false));
  FrameHeader other = frame(FrameKind::kPush, 1);
  other.model = kModel + 1;
  refuses(worker(0), other, good);
  for (const std::uint64_t whose :
       {std::uint64_t{2}, std::uint64_t{0x80000000}, std::uint64_t{kMost}}) {
    FrameHeader passed = frame(FrameKind::kPush, 1);
    passed.argument = whose;
    refuses(server(1), passed, good);
    FrameHeader copy = frame(FrameKind::kReplica, 1);
    copy.argument = std::min<std::uint64_t>(whose + 1, kMost) << 32;
    refuses(server(1), copy, good);
  }
  for (const std::uint64_t parts : {0U, 1U, 9U, kMost >> 1U}) {
    FrameHeader state = frame(FrameKind::kState);
    state.argument = parts << 32 | 1;
    refuses(server(1), state, good);
  }
  FrameHeader sumOnce{.kind = FrameKind::kPush, .model = kNoModel, .layout = 256, .argument = 5};
  refuses(worker(0), sumOnce, good);

  desk.say(worker(0), frame(FrameKind::kPush, 1), good);
  desk.say(worker(1), frame(FrameKind::kPush, 1), good);
  const auto answers = desk.sentTo(worker(1), FrameKind::kValue);
  CHECK_EQUAL(answers.size(), 1U);
  CHECK_EQUAL(floatsOf(answers[0].payload), std::vector<float>{8, 18});
}

TEST(whoseTurnItIs) {
  constexpr int kWorkers = 4;
  Desk desk({.workers = kWorkers, .consistency = Consistency::kAsynchronous, .delayBound = 2});
  registerAt(desk, kWorkers, true);
  beginAt(desk, kWorkers);
  desk.say(worker(0), rulesFrom(1), sgd(1));
  const auto ask = [&](int rank, Round round, std::uint64_t read) {
    FrameHeader header = frame(FrameKind::kAsk, round);
    header.argument = read;
    desk.say(worker(rank), header);
  };
  const auto isAdmitted = [&](int rank) {
    return !desk.sentTo(worker(rank), FrameKind::kAdmit).empty();
  };
  const Payload gradient = payloadOf(std::vector<float>{1, 1});
  // Four that have read the beginning: one is sent, two more fit, the fourth does not.
  for (int rank = 0; rank < 3; ++rank) {
    ask(rank, 1, 0);
  }
  CHECK(isAdmitted(0));
  CHECK(!isAdmitted(1) && !isAdmitted(2));
  ask(3, 1, 0);
  const auto refused = desk.sentTo(worker(3), FrameKind::kValue);
  CHECK_EQUAL(refused.size(), 1U);
  CHECK_EQUAL(refused[0].header.flags, kFrameFlagLate);
  CHECK_EQUAL(floatsOf(refused[0].payload), std::vector<float>{10, 20});
  // Whoever has not been admitted does not get through.
  desk.say(worker(2), frame(FrameKind::kPush, 1), gradient);
  CHECK(desk.sentTo(worker(2), FrameKind::kValue).empty());
  desk.say(worker(0), frame(FrameKind::kPush, 1), gradient);
  const auto first = desk.sentTo(worker(0), FrameKind::kValue);
  CHECK_EQUAL(first.size(), 1U);
  CHECK_EQUAL(first[0].header.flags, 0U);
  CHECK_EQUAL(floatsOf(first[0].payload), std::vector<float>{9, 19});
  // Worker 0, which has read the newest, has time; 1 and 2 have none.
  ask(0, 2, 1);
  const bool one = isAdmitted(1);
  CHECK(one != isAdmitted(2));
  const int next = one ? 1 : 2;
  desk.say(worker(next), frame(FrameKind::kPush, 1), gradient);
  CHECK(isAdmitted(3 - next));
  CHECK(!isAdmitted(0));
  desk.say(worker(3 - next), frame(FrameKind::kPush, 1), gradient);
  CHECK(isAdmitted(0));
  CHECK(desk.refused().empty());
}

TEST(aSliceBeginsOnceAndWithPossibleSteps) {
  Desk desk({.workers = 1});
  registerAt(desk, 1, true);
  beginAt(desk, 1, ~std::uint64_t{0});
  CHECK_EQUAL(desk.refused().size(), 1U);
  beginAt(desk, 1);
  CHECK(desk.refused().empty());
  beginAt(desk, 1);
  CHECK_EQUAL(desk.refused().size(), 2U);
}

TEST(pushesOfManyThreadsAreSummedOnceEach) {
  constexpr int kThreads = 4;
  constexpr SliceIndex kSlices = 5;
  constexpr Round kRounds = 200;
  Desk desk({.workers = kThreads});
  registerAt(desk, kThreads, true, kSlices);
  for (SliceIndex slice = 0; slice < kSlices; ++slice) {
    ByteWriter counters;
    counters.put(std::uint64_t{0});
    for (int number = 0; number < 2 * kThreads; ++number) {
      counters.put(Round{0});
    }
    FrameHeader state = frame(FrameKind::kState, 0, slice);
    state.argument = StateArgument{2, kCountersPart}.packed();
    desk.say(worker(0), state, payloadOf(counters.bytes()));
    state.argument = StateArgument{2, kValuePart}.packed();
    desk.say(worker(0), state, payloadOf(std::vector<float>{0, 0}));
  }
  test::onThreads(kThreads, [&](int rank) {
    for (Round round = 1; round <= kRounds; ++round) {
      if (rank == 0) {
        desk.say(worker(0), rulesFrom(round), sgd(1));
      }
      for (SliceIndex slice = 0; slice < kSlices; ++slice) {
        desk.say(
            worker(rank), frame(FrameKind::kPush, round, slice),
            payloadOf(std::vector<float>{1, static_cast<float>(rank)}));
      }
      for (SliceIndex answered = 0; answered < kSlices;) {
        for (const auto& answer : desk.sentTo(worker(rank), FrameKind::kValue)) {
          ++answered;
          CHECK_EQUAL(answer.header.round, round);
          const float updates = static_cast<float>(round);
          CHECK_EQUAL(
              floatsOf(answer.payload), std::vector<float>{-kThreads * updates, -6 * updates});
        }
        std::this_thread::yield();
      }
      (void)desk.core->audit();
      (void)desk.core->lateWorkers();
    }
  });
  CHECK(desk.refused().empty());
}

} // namespace hvd_order
