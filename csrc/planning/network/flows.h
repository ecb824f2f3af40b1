#pragma once

#include <cstdint>
#include <vector>

namespace hvd_order::simulate {

struct Interval {
  double beginS;
  double endS;
};

/// Links that flows share. Every flow uses one or two links (the sender's and the receiver's).
/// Rates are max-min fair: no flow's rate can grow except at the cost of a flow that is no faster.
/// On one link this is processor sharing. A link carries one direction; a full-duplex link is two
/// links.
///
/// Source: Bertsekas and Gallager, Data Networks, section 6.5.2 (progressive filling).
class Flows final {
 public:
  using Link = std::uint32_t;
  using Id = std::uint32_t;

  /// A flow's use of a link. `weight` is the number of equal flows that it represents there.
  struct Use {
    Link link;
    double weight;
  };

  /// @param capacities work per second of each link.
  explicit Flows(const std::vector<double>& capacities);

  /// @param work amount to carry, in the capacities' unit of work.
  void start(double nowS, Id id, double work, Use first);
  void start(double nowS, Id id, double work, Use first, Use second);

  /// Time at which the next flow ends; infinity without flows.
  [[nodiscard]] double nextEndS() const {
    return nextEndS_;
  }
  /// Ends the flow that ends next, at nextEndS; of simultaneous ones the flow that started first.
  /// @return its id.
  Id finish();

  /// Starts to record busy intervals.
  void startRecording();
  /// By link: merged intervals in which it carried a flow, since `startRecording`.
  [[nodiscard]] const std::vector<std::vector<Interval>>& busy() const {
    return busy_;
  }
  /// Total time for which the link has carried a flow.
  [[nodiscard]] double busyS(Link link) const {
    return state_[link].busyS;
  }

 private:
  struct Flow {
    Id id;
    std::uint32_t uses;
    Use use[2];
    double left;
    double rate;
  };
  struct LinkState {
    double capacity;
    std::uint32_t flows = 0;
    double sinceS = 0; // start of the current busy interval
    double busyS = 0;
    double spare = 0;  // scratch of share()
    double weight = 0; // scratch of share()
  };

  void add(double nowS, const Flow& flow);
  void carry(double untilS);
  void share();

  std::vector<LinkState> state_;
  std::vector<Flow> flows_; // in order of start
  double lastS_ = 0;        // the time to which `left` refers
  double nextEndS_;
  std::size_t next_ = 0; // place of the flow that ends next
  bool recording_ = false;
  std::vector<std::vector<Interval>> busy_;
};

} // namespace hvd_order::simulate
