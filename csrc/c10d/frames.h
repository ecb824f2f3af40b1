#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "transport/control_channel.h"

namespace hvd_order {

// The form of control messages on the wire: frames of one size, which several recvs can be posted
// ahead for.

/// The words of a message's frames, one frame after the other.
std::vector<at::Tensor> framesOf(const ControlMessage& message);

/// A frame to receive into.
at::Tensor emptyFrame();

/// Whether a frame has been received as a whole, without waiting for the recv that receives it.
bool hasArrived(const at::Tensor& frame);

/// A recv under way.
struct Receive {
  at::Tensor frame;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Puts the frames of one sender together.
class Assembly final {
 public:
  /// @return the message that ends with this frame, if one does.
  std::optional<ControlMessage> add(const at::Tensor& frame);

 private:
  ControlMessage message_{};
  std::size_t missing_ = 0; // words of message_ that are still to come
};

/// Ends a wait for the work, which then returns false. The work goes on.
void interrupt(c10d::Work& work) noexcept;

} // namespace hvd_order
