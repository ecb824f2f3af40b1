#include "servers/worker/server_connections.h"

#include <utility>

#include "check.h"
#include "servers/worker/model_registration.h"

// A worker's view of the servers, with connections that only keep what is sent.

namespace hvd_order {

namespace {

struct SentFrames final : Connection {
  void start(OnFrame /*onFrame*/, OnLost /*onLost*/) override {}
  void send(std::uint64_t urgency, FrameHeader header, Payload /*payload*/) override {
    frames.emplace_back(urgency, header);
  }
  void breakOff(const std::string& /*why*/) noexcept override {}
  void stop() noexcept override {}

  std::vector<std::pair<std::uint64_t, FrameHeader>> frames;
};

/// Servers 3 and 5.
struct Servers {
  Servers() {
    connections.add(3, third);
    connections.add(5, fifth);
  }

  std::shared_ptr<SentFrames> third = std::make_shared<SentFrames>();
  std::shared_ptr<SentFrames> fifth = std::make_shared<SentFrames>();
  ServerConnections connections;
};

ModelRegistration oneSlice() {
  return {
      7,
      2,
      Registration{.serversUpdate = true, .slices = {{8, ElementType::kFloat32, {}}}},
      {{3, kNoServer}}};
}

std::vector<FrameKind> kinds(const SentFrames& sent) {
  std::vector<FrameKind> kinds;
  for (const auto& [urgency, header] : sent.frames) {
    kinds.push_back(header.kind);
  }
  return kinds;
}

} // namespace

TEST(aServerIsBusyFromItsFirstPushToItsLast) {
  Servers servers;
  servers.connections.pushBegan(3, 10);
  servers.connections.pushBegan(3, 11); // at the same time as the first
  servers.connections.pushEnded(3, 12);
  servers.connections.pushEnded(3, 14);
  servers.connections.pushBegan(3, 20);
  servers.connections.answerCame(3, 100);
  servers.connections.pushBegan(9, 20); // no such server
  auto figures = servers.connections.takeFigures(21);
  CHECK_EQUAL(figures.size(), 2U);
  CHECK_EQUAL(figures[0].server, 3);
  CHECK_EQUAL(figures[0].busySeconds, 5.0);
  CHECK_EQUAL(figures[0].bytes, 100);
  CHECK_EQUAL(figures[1].busySeconds, 0.0);
  servers.connections.pushEnded(3, 23);
  figures = servers.connections.takeFigures(30);
  CHECK_EQUAL(figures[0].busySeconds, 2.0); // since the call before
  CHECK_EQUAL(figures[0].bytes, 0);
}

TEST(aLostServerIsNamedWithItsReasonAndItsReplica) {
  Servers servers;
  CHECK(servers.connections.lose(3, "connection reset") == servers.third);
  CHECK(servers.connections.lose(3, "connection reset") == nullptr);
  CHECK(servers.connections.isLost({3, kNoServer}));
  CHECK(!servers.connections.isLost({3, 5}));
  CHECK_CONTAINS(servers.connections.lossOf({3, kNoServer}, 1).what(), "nobody has a copy");
  servers.connections.lose(5, "killed");
  CHECK(servers.connections.isLost({3, 5}));
  CHECK_CONTAINS(
      servers.connections.lossOf({3, 5}, 1).what(),
      "server 3 is gone (seen by rank 1: connection reset), and server 5, which has the copy");
  CHECK(servers.connections.servers().empty());
  CHECK_EQUAL(servers.connections.takeAll().size(), 2U); // their threads may still run
  CHECK_THROWS(BrokenInvariant, servers.connections.at(3));
}

TEST(aServerHasOneConnection) {
  Servers servers;
  CHECK_THROWS(InvalidUsage, servers.connections.add(3, servers.fifth));
  CHECK(servers.connections.find(3) == servers.third.get());
}

TEST(aMapIsFollowedByTheSwitchBehindAllWaitingFrames) {
  Servers servers;
  ModelRegistration model = oneSlice();
  CHECK(model.adopt(2, {{5, kNoServer}}, servers.connections));
  CHECK(!model.adopt(2, {{3, kNoServer}}, servers.connections));
  CHECK_EQUAL(model.places().front().owner, 5);
  CHECK_EQUAL(model.firstOwner(0), 3);
  for (const auto& server : {servers.third, servers.fifth}) {
    CHECK(kinds(*server) == std::vector{FrameKind::kMap, FrameKind::kSwitch});
    CHECK_EQUAL(server->frames[0].first, Connection::kAtOnce);
    CHECK_EQUAL(server->frames[1].first, Connection::kLast);
    CHECK_EQUAL(server->frames[1].second.map, 2U);
  }
}

TEST(aServerThatComesLaterGetsTheRulesThatMayStillBeNeeded) {
  Servers servers;
  ModelRegistration model = oneSlice();
  const std::vector<UpdateRule> rules(1);
  model.setRules(rules, 1, 0, servers.connections);
  model.setRules(rules, 4, 2, servers.connections); // round 3 may still be pushed
  SentFrames late;
  model.sendTo(late);
  CHECK(
      kinds(late) ==
      std::vector{FrameKind::kModel, FrameKind::kMap, FrameKind::kRule, FrameKind::kRule});
  model.setRules(rules, 9, 5, servers.connections);
  SentFrames later;
  model.sendTo(later);
  CHECK_EQUAL(later.frames.size(), 4U); // the rules from round 1 are needed no more
  CHECK_EQUAL(later.frames[2].second.argument, 2U);
  CHECK_EQUAL(later.frames[2].second.round, 4U);
  CHECK_EQUAL(servers.third->frames.size(), 3U);
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
