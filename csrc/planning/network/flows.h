#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace hvd_order::simulate {

struct Interval {
  double beginS;
  double endS;
};

/// Flows that share one link equally (processor sharing). A flow's work is the time for which it
/// alone would occupy the link.
class Flows final {
 public:
  using Id = std::uint32_t;

  void start(double nowS, Id id, double work);

  /// Time at which the next flow ends; infinity without flows.
  [[nodiscard]] double nextEndS() const {
    return nextEndS_;
  }
  /// Ends the flow that ends next, at nextEndS; of simultaneous ones the flow that started first.
  /// @return its id.
  Id finish();

  /// Starts to record busy intervals.
  void startRecording() {
    recording_ = true;
  }
  /// Merged intervals in which the link carried a flow, since `startRecording`.
  [[nodiscard]] const std::vector<Interval>& busy() const {
    return busy_;
  }
  /// Total time for which the link has carried a flow.
  [[nodiscard]] double busyS() const {
    return busyS_;
  }

 private:
  struct Flow {
    Id id;
    double left;
  };

  void carry(double untilS);
  void findNext();

  std::vector<Flow> flows_; // in order of start
  double lastS_ = 0;        // the time to which `left` refers
  double sinceS_ = 0;       // start of the current busy interval
  double busyS_ = 0;
  double nextEndS_ = std::numeric_limits<double>::infinity();
  std::size_t next_ = 0; // place of the flow that ends next
  bool recording_ = false;
  std::vector<Interval> busy_;
};

} // namespace hvd_order::simulate
