#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <span>

#include "base/types.h"

namespace hvd_order {

/// What a StallWatch asks the engine to do.
enum class ActionKind : std::uint8_t {
  kNone,
  kAsk,     ///< ask the other ranks for the gradients of `model`
  kWarn,    ///< warn that nothing has moved for the time `stalled`
  kTimeOut, ///< fail, because nothing has moved for the timeout
  kFail,    ///< fail with `error`
};

/// Decides when exchanges that do not move become a question to the other ranks, a warning, or the
/// engine's failure. Pure: events and times in, one action out. The engine carries the action out,
/// and calls every method under its own lock.
///
/// It watches for three conditions (watch.cc says why):
/// - Suspicion: a transfer has failed, and its cause may be named soon.
/// - Stall: gradients of a model are under way, and none of them has moved for some time.
/// - Stranding: an exchange is under way that needs a rank that has shut down.
class StallWatch final {
 public:
  using Clock = std::chrono::steady_clock;

  struct Limits {
    std::chrono::nanoseconds timeout; ///< a stall of this time fails the job
    std::chrono::nanoseconds warning; ///< a stall of this time is worth a warning
  };

  struct Action {
    ActionKind kind = ActionKind::kNone;
    ModelId model = 0;
    std::chrono::nanoseconds stalled{};
    std::exception_ptr error;
  };

  StallWatch(Rank rank, int size, Limits limits, Clock::time_point now);

  /// A model is registered; its clock starts.
  void addModel(ModelId model, Clock::time_point now);
  void removeModel(ModelId model);
  /// An exchange of the model has begun or moved. No effect if there is no such model.
  void progress(ModelId model, Clock::time_point now);
  /// A transfer has failed on this rank. Only the first error counts.
  void transferFailed(std::exception_ptr error, Clock::time_point now);
  /// A rank has shut down without an error. Only the first one counts.
  void rankLeft(Rank rank, Clock::time_point now);
  /// The engine has failed: there is nothing to watch any more.
  void end();

  /// @param underWay the models that have exchanges under way.
  /// @return what to do now. Every action comes once in a stall; after a failure there is none.
  Action look(Clock::time_point now, std::span<const ModelId> underWay);
  /// When to call `look` next, if there is no event before.
  [[nodiscard]] Clock::time_point nextLook(Clock::time_point now, std::span<const ModelId> underWay)
      const;

  /// Whether a stall has lasted for nearly the timeout, and the other ranks have been asked.
  [[nodiscard]] bool isNearlyTimedOut(Clock::time_point now, std::span<const ModelId> underWay)
      const;
  /// Whether the other ranks have been asked in the present stall.
  [[nodiscard]] bool hasAsked() const {
    return askedFor_.has_value();
  }
  /// Whether a rank has shut down, so that a new exchange may be stranded.
  [[nodiscard]] bool hasRankLeft() const {
    return left_.has_value();
  }

 private:
  /// A model with exchanges under way, and when one of them moved last.
  struct Stall {
    ModelId model;
    Clock::time_point since;
  };

  [[nodiscard]] std::optional<Stall> longestStall(std::span<const ModelId> underWay) const;
  [[nodiscard]] std::chrono::nanoseconds patience() const;
  [[nodiscard]] Clock::time_point strandedAt() const;
  [[nodiscard]] std::exception_ptr strandedError() const;
  [[nodiscard]] std::exception_ptr withoutCulprit(const std::exception_ptr& error) const;

  const Rank rank_;
  const int size_;
  const Limits limits_;
  bool ended_ = false;

  // By model: threads train models of their own, and one that goes on must not hide that another
  // waits in vain.
  std::map<ModelId, Clock::time_point> progressOf_;
  Clock::time_point lastProgress_;
  std::optional<ModelId> askedFor_; // the stalled model that the other ranks were asked about
  bool warned_ = false;             // in this stall

  std::exception_ptr suspicion_; // the error of a failed transfer
  Clock::time_point suspicionEnds_;

  std::optional<Rank> left_; // the first rank that shut down
  Clock::time_point leftAt_;
};

} // namespace hvd_order
