#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace hvd_order::simulate {

/// What a future event is.
enum class EventKind : std::uint8_t {
  kTaskEnd,            ///< device a's stream b has ended an op or an update
  kMessage,            ///< message number a has reached its rank
  kLatencyOver,        ///< transfer number a begins to use the link
  kReservationExpires, ///< the link reservation of round a has lasted long enough
  // Of sampled training (planning/sampled):
  kWorkerBegins, ///< worker a begins its first step
  kStageEnd,     ///< the stage number a of a transfer or an update is over
};

/// A future event. The meaning of `a` and `b` depends on the kind.
struct Event {
  double atS;
  std::uint64_t number; ///< in the order in which events were announced
  EventKind kind;
  std::uint32_t a;
  std::uint32_t b;
};

/// Virtual time and all future events. Events happen in order of time; simultaneous events happen
/// in the order in which they were announced. So two runs are identical.
class Clock final {
 public:
  [[nodiscard]] double nowS() const {
    return nowS_;
  }
  void announce(double inS, EventKind kind, std::uint32_t a, std::uint32_t b = 0) {
    announceAt(nowS_ + inS, kind, a, b);
  }
  /// @param atS not before now.
  void announceAt(double atS, EventKind kind, std::uint32_t a, std::uint32_t b = 0) {
    events_.push_back({atS, announced_++, kind, a, b});
    std::push_heap(events_.begin(), events_.end(), kLater);
  }
  /// Advances to the next event if it is no later than `limitS`, else to `limitS`.
  /// @return the event; none if the limit was reached first.
  std::optional<Event> advance(double limitS) {
    if (events_.empty() || events_.front().atS > limitS) {
      nowS_ = limitS;
      return std::nullopt;
    }
    std::pop_heap(events_.begin(), events_.end(), kLater);
    const Event event = events_.back();
    events_.pop_back();
    nowS_ = event.atS;
    return event;
  }
  /// Advances to a moment that no event precedes; those of that moment are still to come.
  void moveTo(double atS) {
    nowS_ = atS;
  }
  [[nodiscard]] bool empty() const {
    return events_.empty();
  }
  /// Time of the next event; there must be one.
  [[nodiscard]] double nextS() const {
    return events_.front().atS;
  }

 private:
  static constexpr auto kLater = [](const Event& a, const Event& b) {
    return a.atS != b.atS ? a.atS > b.atS : a.number > b.number;
  };

  double nowS_ = 0;
  std::uint64_t announced_ = 0;
  std::vector<Event> events_; // binary heap, the next event in front
};

} // namespace hvd_order::simulate
