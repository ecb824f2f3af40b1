#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "servers/wire/group.h"
#include "servers/wire/options.h"
#include "servers/wire/payload.h"
#include "servers/wire/registration.h"

namespace hvd_order {

/// One rule for each group of parameters.
using Rules = std::vector<UpdateRule>;
struct RulesSince {
  Round since;
  std::shared_ptr<const Rules> rules;
};
using RuleBook = std::map<RulesNumber, RulesSince>;

/// Everything that moves with a slice.
struct SliceState {
  std::uint64_t stepsBefore = 0; ///< steps of the optimizer before the model was registered
  Round version = 0;             ///< updates applied since
  std::vector<Round> seen;       ///< by worker, the last round applied
  std::vector<Round> skipped;    ///< by worker, the last round skipped; 0: none
  Payload value;                 ///< sum of the last round, or parameters; may be empty
  std::vector<Payload> moments;  ///< the optimizer's state, of `value`'s size each
};

/// The newest rules that hold for a round, or the oldest known rules if the round is older than
/// all. `rules` must not be empty.
[[nodiscard]] RuleBook::const_iterator rulesFor(const RuleBook& rules, Round round);

/// The state of one slice on a server: stores pushes, and applies them when they are due. Knows
/// nothing of other processes. Not thread-safe.
///
/// The pushes of a round are kept until all have arrived and are then added in rank order, so the
/// result does not depend on the order of arrival. A worker pushes a round after it has the answer
/// to the round before, so at most one push of each worker waits.
class SliceStore {
 public:
  struct AppliedUpdate {
    Round round;
    int worker;        ///< kEveryWorker for a whole round; for a group the first worker
    Payload sum;       ///< empty: the worker's update was skipped
    double change;     ///< Euclidean norm of the change of `value`, if measured
    RulesNumber rules; ///< 0: no rules
    std::vector<Member> members = {}; ///< asynchronous: the updates in a group's sum
    /// Number of workers' updates; 1 for a whole round, 0 for a skipped update.
    [[nodiscard]] Round count() const {
      return members.empty() ? Round{bool(sum)} : static_cast<Round>(members.size());
    }
  };
  static constexpr int kEveryWorker = -1;

  struct WaitingPush {
    Round round = 0;
    Payload gradient;
    bool isSkipped = false; ///< there is no gradient and none will come
    [[nodiscard]] bool isHere() const {
      return isSkipped || bool(gradient);
    }
  };

  /// @param mayMiss updates may have been lost with another server. A round that a worker has gone
  ///   beyond was applied there, so this slice does not wait for it.
  SliceStore(
      const SliceShape& shape,
      bool serversUpdate,
      Consistency consistency,
      int workers,
      bool mayMiss = false);

  /// Whether the slice has its state; nothing can be applied without it.
  [[nodiscard]] bool installed() const {
    return installed_;
  }
  void install(SliceState state);
  /// Starts with these parameters, or with nothing before the first sum.
  void begin(Payload value);
  /// The state that another server needs to continue; the payloads are shared, not copied.
  [[nodiscard]] const SliceState& state() const {
    return state_;
  }
  /// Drops the state, because another server has it from now on.
  void uninstall();

  /// Whether `other` contains every update of this state, and more.
  [[nodiscard]] bool isBehind(const SliceState& other) const;
  /// Whether this push has been applied before: workers send pushes again after a server is lost.
  [[nodiscard]] bool applied(int worker, Round round) const;
  /// Stores a push. Of two pushes of a worker, the one of the later round is kept; of two pushes
  /// of one round, the second.
  void push(int worker, Round round, Payload gradient);
  /// Asynchronous: stores the sum of several workers' updates, which are applied together.
  /// Replaces a group that waits.
  void pushGroup(Payload total, std::vector<Member> members);
  /// Drops the waiting group. @return whether there was one.
  bool dropGroup();
  /// Asynchronous: counts a worker's update as made, without a change.
  void skip(int worker, Round round);
  [[nodiscard]] bool wasSkipped(int worker, Round round) const {
    return installed_ && round > 0 && round == state_.skipped[static_cast<std::size_t>(worker)];
  }
  /// Marks a round as over: a worker has its answer, perhaps from a server that is lost.
  void markOver(Round round) {
    over_ = std::max(over_, round);
  }
  /// Removes and returns the waiting pushes, by worker; drops a waiting group.
  std::vector<WaitingPush> takeWaiting();
  /// Removes and returns the waiting pushes that have been applied before; their workers need an
  /// answer.
  std::vector<std::pair<int, Round>> takeApplied();
  [[nodiscard]] bool waits() const;
  /// Workers whose push of the next round has not arrived.
  [[nodiscard]] std::vector<int> missing() const;

  /// Applies the next round, or push, that is due. @return nothing if none is due or its rules are
  /// not known.
  std::optional<AppliedUpdate> advance(const RuleBook& rules, bool measureChange);
  /// Applies an update that the owner of the slice has applied.
  /// @param version of the owner after the update.
  /// @return false if the rules of the update are not known here yet; the caller tries again.
  /// @throws FrameError if updates before it are missing or it has been applied.
  bool follow(const AppliedUpdate& update, Round version, const RuleBook& rules);
  /// Applies nothing before these rules are known.
  void needRules(RulesNumber number) {
    neededRules_ = std::max(neededRules_, number);
  }

  /// Rounds that have been applied for every worker.
  [[nodiscard]] Round slowest() const;

 private:
  [[nodiscard]] bool isWhole(Round round) const;
  struct WaitingGroup {
    Payload sum;
    std::vector<Member> members;
  };

  void giveUpMissed();
  [[nodiscard]] bool follows(int worker, Round round) const;
  bool takeNext(AppliedUpdate& update);
  std::vector<WaitingPush>::iterator nextPush();
  void apply(AppliedUpdate& update, const Rules* rules, bool measureChange);
  void update(const Rules& rules, AppliedUpdate& update, bool measureChange);

  const SliceShape& shape_;
  const bool serversUpdate_;
  const Consistency consistency_;
  const int workers_;
  const bool mayMiss_;
  bool installed_ = false;
  RulesNumber neededRules_ = 0;
  Round over_ = 0;
  SliceState state_;
  std::vector<WaitingPush> waiting_; // by worker; empty if no push has come
  std::optional<WaitingGroup> group_;
};

} // namespace hvd_order
