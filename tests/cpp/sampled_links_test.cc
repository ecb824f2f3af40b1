#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "planning/clock.h"
#include "planning/sampled/links/shared_links.h"
#include "planning/sampled/links/turn_ends.h"

// SharedLinks and TurnEnds against turns whose rates are computed anew for all connections, and
// whose bytes are counted one by one: with a wrong rate a turn ends at another time.

namespace hvd_order::simulate {

namespace {

constexpr double kEps = 1e-9;

bool near(double a, double b) {
  return std::abs(a - b) <= kEps * std::max({1.0, std::abs(a), std::abs(b)});
}

struct Turn {
  bool active = false;
  std::uint64_t came = 0;
  double left = 0;
  double rate = 0;
};

struct Setup {
  std::uint32_t workers;
  std::uint32_t servers;
  double workerBytesPerS;
  double serverBytesPerS;
  Sharing sharing;
  std::uint32_t others = 0; // ends with the fastest links, numbered behind the workers
  [[nodiscard]] std::size_t connections() const {
    return std::size_t{workers + others} * servers;
  }
};

Setup drawSetup(std::mt19937& random) {
  const auto rate = [&random] { return std::vector<double>{1, 2, 2, 3, 10}[random() % 5]; };
  const auto workers = static_cast<std::uint32_t>(1 + random() % 12);
  const auto servers = static_cast<std::uint32_t>(1 + random() % 5);
  const double workerBytesPerS = rate();
  const double serverBytesPerS = rate();
  const Sharing sharing = random() % 3 == 0 ? Sharing::kFifo : Sharing::kFair;
  const std::uint32_t others = random() % 3 == 0 ? servers : 0;
  return {workers, servers, workerBytesPerS, serverBytesPerS, sharing, others};
}

/// All connections of one direction, without any memory of rates.
class Plain final {
 public:
  explicit Plain(const Setup& setup) : turns(setup.connections()), setup_(setup) {}

  std::vector<Turn> turns; // by connection

  void share() {
    workers_.assign(setup_.workers, setup_.workerBytesPerS);
    workers_.resize(
        setup_.workers + setup_.others, std::max(setup_.workerBytesPerS, setup_.serverBytesPerS));
    servers_.assign(setup_.servers, setup_.serverBytesPerS);
    if (setup_.sharing == Sharing::kFair) {
      shareFairly();
    } else {
      shareInOrder();
    }
  }

  [[nodiscard]] Route route(std::uint32_t number) const {
    return {number / setup_.servers, number % setup_.servers, number};
  }

 private:
  [[nodiscard]] std::vector<std::uint32_t> active() const {
    std::vector<std::uint32_t> found;
    for (std::uint32_t i = 0; i < turns.size(); ++i) {
      if (turns[i].active) {
        found.push_back(i);
      }
    }
    return found;
  }

  /// Progressive filling: the link with the least share fixes the rates of its connections.
  void shareFairly() {
    std::vector<std::uint32_t> toGo = active();
    while (!toGo.empty()) {
      std::vector<double> workersToGo(workers_.size());
      std::vector<double> serversToGo(setup_.servers);
      for (const std::uint32_t i : toGo) {
        ++workersToGo[route(i).worker];
        ++serversToGo[route(i).server];
      }
      const auto shareOf = [&](std::uint32_t i) {
        return std::min(
            workers_[route(i).worker] / workersToGo[route(i).worker],
            servers_[route(i).server] / serversToGo[route(i).server]);
      };
      double least = std::numeric_limits<double>::infinity();
      for (const std::uint32_t i : toGo) {
        least = std::min(least, shareOf(i));
      }
      std::vector<std::uint32_t> fixed;
      std::vector<std::uint32_t> rest;
      for (const std::uint32_t i : toGo) {
        (shareOf(i) <= least * (1 + 1e-12) ? fixed : rest).push_back(i);
      }
      for (const std::uint32_t i : fixed) {
        turns[i].rate = least;
        workers_[route(i).worker] = std::max(workers_[route(i).worker] - least, 0.0);
        servers_[route(i).server] = std::max(servers_[route(i).server] - least, 0.0);
      }
      toGo = rest;
    }
  }

  void shareInOrder() {
    std::vector<std::uint32_t> order = active();
    std::sort(
        order.begin(), order.end(), [&](auto a, auto b) { return turns[a].came < turns[b].came; });
    for (const std::uint32_t i : order) {
      double& worker = workers_[route(i).worker];
      double& server = servers_[route(i).server];
      turns[i].rate = std::min(worker, server);
      worker -= turns[i].rate;
      server -= turns[i].rate;
    }
  }

  Setup setup_;
  std::vector<double> workers_; // what is left of the links
  std::vector<double> servers_;
};

SharedLinks linksOf(const Setup& setup) {
  return {setup.workers,         setup.servers, setup.workerBytesPerS,
          setup.serverBytesPerS, setup.sharing, setup.others};
}

/// Turns of connections that begin, go on and stop at random.
class Traffic final {
 public:
  explicit Traffic(unsigned seed)
      : random_(seed),
        setup_(drawSetup(random_)),
        links_(linksOf(setup_)),
        ends_(setup_.workers + setup_.others, setup_.servers, clock_),
        plain_(setup_) {}

  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      const double nextS = plainNextS();
      if (!near(ends_.earliestS(), nextS) && ends_.earliestS() != nextS) {
        throw test::Failure(concat("the next end is ", ends_.earliestS(), ", expected ", nextS));
      }
      if (nextS == NextEnd::kNever || random_() % 4 == 0) {
        const double untilS = nextS == NextEnd::kNever ? clock_.nowS() + 1 : ends_.earliestS();
        moveTo(clock_.nowS() + (untilS - clock_.nowS()) * static_cast<double>(random_() % 3) / 3);
        begin(static_cast<std::uint32_t>(random_() % plain_.turns.size()));
      } else {
        moveTo(ends_.earliestS());
        while (ends_.earliestS() <= clock_.nowS()) {
          end();
        }
      }
      beginTurns();
    }
  }

 private:
  [[nodiscard]] double plainNextS() const {
    double nextS = NextEnd::kNever;
    for (const Turn& turn : plain_.turns) {
      if (turn.active && turn.rate > 0) {
        nextS = std::min(nextS, clock_.nowS() + turn.left / turn.rate);
      }
    }
    return nextS;
  }

  void moveTo(double atS) {
    for (Turn& turn : plain_.turns) {
      turn.left = std::max(turn.left - turn.rate * (atS - clock_.nowS()), 0.0);
    }
    clock_.moveTo(atS);
  }

  void begin(std::uint32_t number) {
    if (!plain_.turns[number].active) {
      links_.activate(plain_.route(number));
      turnTo(number);
    }
  }

  void end() {
    const std::uint32_t number = ends_.end();
    CHECK(plain_.turns[number].active);
    CHECK(near(plain_.turns[number].left, 0));
    ended_.push_back(number);
  }

  void turnTo(std::uint32_t number) {
    const double bytes = 1 + static_cast<double>(random_() % 3);
    // A transfer that waited came earlier than some that move.
    const std::uint64_t came = 128 * (5 + came_++ - random_() % 5) + number;
    plain_.turns[number] = {.active = true, .came = came, .left = bytes};
    links_.turnTo(plain_.route(number), came);
    ends_.begin(plain_.route(number), bytes);
  }

  void beginTurns() {
    for (const std::uint32_t number : ended_) {
      if (random_() % 3 > 0) {
        turnTo(number);
        continue;
      }
      plain_.turns[number] = {};
      links_.deactivate(plain_.route(number));
      ends_.stop(plain_.route(number));
    }
    ended_.clear();
    if (links_.share()) {
      ends_.setRates(links_);
    }
    ends_.findEarliest();
    plain_.share();
  }

  std::mt19937 random_;
  Setup setup_;
  Clock clock_;
  SharedLinks links_;
  TurnEnds ends_;
  Plain plain_;
  std::uint64_t came_ = 0;
  std::vector<std::uint32_t> ended_;
};

TEST(turns_end_when_their_bytes_are_sent) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    try {
      Traffic(seed).run(300);
    } catch (const test::Failure& failure) {
      throw test::Failure(concat("seed ", seed, ": ", failure.what()));
    }
  }
}

/// Turns of so many bytes begin at once; 0: none.
/// @return those that end first, seen before `findEarliest`.
std::vector<std::uint32_t> firstEnds(const Setup& setup, const std::vector<double>& bytes) {
  SharedLinks links = linksOf(setup);
  Clock clock;
  TurnEnds ends(setup.workers, setup.servers, clock);
  const Plain plain(setup);
  for (std::uint32_t number = 0; number < bytes.size(); ++number) {
    if (bytes[number] > 0) {
      links.activate(plain.route(number));
      ends.begin(plain.route(number), bytes[number]);
    }
  }
  CHECK(links.share());
  ends.setRates(links);
  ends.findEarliest();
  clock.moveTo(ends.earliestS());
  std::vector<std::uint32_t> ended;
  while (ends.earliestS() <= clock.nowS()) {
    ended.push_back(ends.end());
  }
  return ended;
}

TEST(turns_that_end_together_are_all_seen_to_end) {
  using Numbers = std::vector<std::uint32_t>;
  const std::vector<double> bytes{1, 1, 1, 1, 1, 1, 1, 1, 1, 2};
  const Setup slowServers{5, 2, 100.0, 1.0, Sharing::kFair};
  CHECK_EQUAL(firstEnds(slowServers, bytes), Numbers{0, 2, 4, 6, 8, 1, 3, 5, 7});
  const Setup slowWorkers{5, 2, 1.0, 100.0, Sharing::kFair};
  CHECK_EQUAL(firstEnds(slowWorkers, bytes), Numbers{0, 1, 2, 3, 4, 5, 6, 7, 8});
  // Worker 0 gives 0.375 to each of its turns, and server 1 what is left, 0.625, to worker 1's.
  const Setup both{2, 2, 0.75, 1.0, Sharing::kFair};
  CHECK_EQUAL(firstEnds(both, {0.375, 0.375, 0, 0.625}), Numbers{3, 0, 1});
}

} // namespace

} // namespace hvd_order::simulate
