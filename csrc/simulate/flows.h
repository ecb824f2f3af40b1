#pragma once

#include <cstdint>
#include <vector>

namespace hvd_order::simulate {

struct Interval {
  double beginS;
  double endS;
};

/// Links that flows share. Every flow uses one link or two (the sender's and the receiver's), and
/// rates are max-min fair: nobody could have more without taking it from somebody who has less. On
/// one link that is processor sharing. A link carries one direction; a full-duplex link is two.
///
/// Source: Bertsekas and Gallager, Data Networks, section 6.5.2 (progressive filling).
class Flows final {
 public:
  using Link = std::uint32_t;
  using Id = std::uint32_t;

  /// One flow's part of a link. `weight` is how many equal flows it stands for there.
  struct Use {
    Link link;
    double weight;
  };

  /// @param capacities of the links, in work a second.
  explicit Flows(const std::vector<double>& capacities);

  /// @param work what has to be carried, in the unit of the capacities.
  void start(double nowS, Id id, double work, Use first);
  void start(double nowS, Id id, double work, Use first, Use second);

  /// When the next flow ends; infinity without flows.
  [[nodiscard]] double nextEndS() const {
    return nextEndS_;
  }
  /// Ends the flow that ends next, at nextEndS; of several the one that started first.
  Id finish();

  /// From now on busy intervals are kept.
  void startRecording();
  /// By link: unions of the times when it carried something, since `startRecording`.
  [[nodiscard]] const std::vector<std::vector<Interval>>& busy() const {
    return busy_;
  }
  /// How long the link has carried something, in all.
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
  struct State {
    double capacity;
    std::uint32_t flows = 0;
    double sinceS = 0; // when it began to be busy
    double busyS = 0;
    double spare = 0;  // scratch of share()
    double weight = 0; // scratch of share()
  };

  void add(double nowS, const Flow& flow);
  void carry(double untilS);
  void share();

  std::vector<State> state_;
  std::vector<Flow> flows_; // in the order of their starts
  double lastS_ = 0;        // `left` is as of then
  double nextEndS_;
  std::size_t next_ = 0; // place of the flow that ends next
  bool recording_ = false;
  std::vector<std::vector<Interval>> busy_;
};

} // namespace hvd_order::simulate
