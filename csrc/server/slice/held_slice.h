#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "server/wire/group.h"
#include "server/wire/payload.h"
#include "server/wire/registration.h"

namespace hvd_order {

/// When pushes are applied.
enum class Consistency : std::uint8_t {
  kSynchronous,  ///< a round at a time, when every worker's push of it is there
  kAsynchronous, ///< each push by itself, as it comes
};

/// One for each group of parameters.
using Rules = std::vector<UpdateRule>;
/// Counts the rules that worker 0 has given for a model; the first are 1. The round since which
/// they hold does not tell them apart: it may think better of them before it pushes.
using RulesNumber = std::uint32_t;
struct RulesSince {
  Round since;
  std::shared_ptr<const Rules> rules;
};
using RuleBook = std::map<RulesNumber, RulesSince>;

/// All that has to move with a slice.
struct SliceState {
  std::uint64_t stepsBefore = 0; ///< of the optimizer, before the model was registered
  Round version = 0;             ///< updates applied since
  std::vector<Round> seen;       ///< by worker, the last round applied
  std::vector<Round> skipped;    ///< by worker, the last of them that made no change; 0: none
  Payload value;                ///< sum of the last round, or parameters; none before the first sum
  std::vector<Payload> moments; ///< the optimizer's state, of `value`'s size each
};

/// The newest rules for a round; the oldest that are known if it is older still. `rules` is not
/// empty.
[[nodiscard]] RuleBook::const_iterator rulesFor(const RuleBook& rules, Round round);

/// One slice on a server: pushes go in, and are applied when it is time. Not thread-safe.
///
/// A round's pushes are kept until all are there and are then added in rank order, so that the
/// result does not depend on who came first. A worker pushes a round when it has its answer to the
/// one before, so at most one push of each waits.
class HeldSlice {
 public:
  struct Update {
    Round round;
    int worker;        ///< kEveryWorker for a whole round; of several workers the first
    Payload sum;       ///< none: the worker's update was skipped
    double change;     ///< Euclidean norm of what `value` changed by, if asked for
    RulesNumber rules; ///< 0: there are none
    std::vector<Member> members = {}; ///< asynchronous: of a sum of several workers' updates
    /// How many updates it counts for.
    [[nodiscard]] Round count() const {
      return members.empty() ? Round{bool(sum)} : static_cast<Round>(members.size());
    }
  };
  static constexpr int kEveryWorker = -1;

  struct Waiting {
    Round round = 0;
    Payload gradient;
    bool isSkipped = false; ///< there is no gradient, and there will be none
    [[nodiscard]] bool isHere() const {
      return isSkipped || bool(gradient);
    }
  };

  /// @param mayMiss updates may have been lost with another server. A round that a worker has gone
  ///   beyond was applied there, so it is not waited for.
  HeldSlice(
      const SliceShape& shape,
      bool serversUpdate,
      Consistency consistency,
      int workers,
      bool mayMiss = false);

  /// Whether it knows what came before: only then can anything be applied.
  [[nodiscard]] bool installed() const {
    return installed_;
  }
  void install(SliceState state);
  /// Parameters to begin with, or nothing before the first sum.
  void begin(Payload value);
  /// What another server needs to go on; the payloads are shared, not copied.
  [[nodiscard]] const SliceState& state() const {
    return state_;
  }
  /// Forgets the state, as it lives elsewhere from now on.
  void uninstall();

  /// Whether that state has all that this one has, and more.
  [[nodiscard]] bool isBehind(const SliceState& other) const;
  /// Whether that push has been applied before: it was sent again after a server was lost.
  [[nodiscard]] bool applied(int worker, Round round) const;
  /// Of two pushes of a worker the later round stays, of one round the last.
  void push(int worker, Round round, Payload gradient);
  /// Asynchronous: the sum of several workers' updates, which are applied together. Takes the place
  /// of one that waits.
  void pushGroup(Payload total, std::vector<Member> members);
  /// Drops it. @return whether there was one.
  bool dropGroup();
  /// Asynchronous: a worker's update counts as made, without a change.
  void skip(int worker, Round round);
  [[nodiscard]] bool wasSkipped(int worker, Round round) const {
    return installed_ && round > 0 && round == state_.skipped[static_cast<std::size_t>(worker)];
  }
  /// A worker has its answer to that round, perhaps of a server that is lost.
  void markOver(Round round) {
    over_ = std::max(over_, round);
  }
  /// Takes out the pushes that wait, by worker; drops a group.
  std::vector<Waiting> takeWaiting();
  /// Takes out those that have been applied before: they want their answer.
  std::vector<std::pair<int, Round>> takeApplied();
  [[nodiscard]] bool waits() const;
  /// The workers whose push of the next round has not come.
  [[nodiscard]] std::vector<int> missing() const;

  /// Applies the next round, or push, that is due; none if none is, or its rules are not known.
  std::optional<Update> advance(const RuleBook& rules, bool measureChange);
  /// Applies what the owner of the slice has applied.
  /// @param version that it led to there.
  /// @return false if its rules are not known here yet: it is to be tried again.
  /// @throws FrameError if updates before it are missing or it has been applied.
  bool follow(const Update& update, Round version, const RuleBook& rules);
  /// Nothing is applied before these rules are known.
  void needRules(RulesNumber number) {
    neededRules_ = std::max(neededRules_, number);
  }

  /// Rounds that every worker has had applied.
  [[nodiscard]] Round slowest() const;

 private:
  [[nodiscard]] bool isWhole(Round round) const;
  struct Group {
    Payload sum;
    std::vector<Member> members;
  };

  void giveUpMissed();
  [[nodiscard]] bool follows(int worker, Round round) const;
  bool takeNext(Update& update);
  std::vector<Waiting>::iterator nextPush();
  void apply(Update& update, const Rules* rules, bool measureChange);
  void update(const Rules& rules, Update& update, bool measureChange);

  const SliceShape& shape_;
  const bool serversUpdate_;
  const Consistency consistency_;
  const int workers_;
  const bool mayMiss_;
  bool installed_ = false;
  RulesNumber neededRules_ = 0;
  Round over_ = 0;
  SliceState state_;
  std::vector<Waiting> waiting_; // by worker; empty before the first push
  std::optional<Group> group_;
};

} // namespace hvd_order
