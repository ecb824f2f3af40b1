#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace hvd_order::simulate {

/// What is going to happen. What `a` and `b` mean is the affair of whoever is called.
struct Event {
  enum class Kind : std::uint8_t {
    kTaskEnd,            ///< device a's stream b has ended an op or an update
    kMessage,            ///< message number a has reached its rank
    kLatencyOver,        ///< transfer number a begins to use the link
    kReservationExpires, ///< what is held has waited long enough for the first slice of round a
    kServerDone,         ///< the servers have summed up and applied slice a
  };
  double atS;
  std::uint64_t number; ///< in the order in which events were announced
  Kind kind;
  std::uint32_t a;
  std::uint32_t b;
};

/// Virtual time, and all that is to come. Events happen in the order of their time, and at the same
/// time in the order in which they were announced, so two runs are the same.
class Clock final {
 public:
  [[nodiscard]] double nowS() const {
    return nowS_;
  }
  void announce(double inS, Event::Kind kind, std::uint32_t a, std::uint32_t b = 0) {
    events_.push_back({nowS_ + inS, announced_++, kind, a, b});
    std::push_heap(events_.begin(), events_.end(), kLater);
  }
  /// Goes on to the next event, if it comes no later than `limitS`; else to `limitS`.
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
  [[nodiscard]] bool empty() const {
    return events_.empty();
  }

 private:
  static constexpr auto kLater = [](const Event& a, const Event& b) {
    return a.atS != b.atS ? a.atS > b.atS : a.number > b.number;
  };

  double nowS_ = 0;
  std::uint64_t announced_ = 0;
  std::vector<Event> events_; // binary heap, the next one in front
};

} // namespace hvd_order::simulate
