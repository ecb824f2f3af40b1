#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "transport/message_frames.h"

namespace hvd_order {

// Frames of control messages (transport/message_frames.h) as tensors, which Gloo carries.

/// The frames of a message.
std::vector<at::Tensor> framesOf(const ControlMessage& message);

/// A frame to receive into.
at::Tensor emptyFrame();

/// Whether a frame has been received as a whole, without waiting for the recv that receives it.
bool hasArrived(const at::Tensor& frame);

/// The words of a frame.
std::span<const std::uint32_t> wordsOf(const at::Tensor& frame);

/// A recv under way.
struct Receive {
  at::Tensor frame;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Ends a wait for the work, which then returns false. The work goes on.
void interrupt(c10d::Work& work) noexcept;

} // namespace hvd_order
