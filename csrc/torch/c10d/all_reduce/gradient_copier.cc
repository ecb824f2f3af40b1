#include "torch/c10d/all_reduce/gradient_copier.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/thread_name.h"

// A thread that copies gradients into their buffers, for the CPU, where no stream does so.
//
// The training thread only adds an order and continues with the backward pass. One thread takes
// the orders in turn, so gradients become ready in the order in which the backward pass produced
// them. The copy runs in pieces of GRAIN_SIZE elements: ATen does not spread such pieces over its
// threads, whose cores the training uses.
//
// Invariant: the copying thread never takes the GIL. Destroying a tensor that Python knows needs
// it, so gradients that have been copied are kept until `release`, which a thread with the GIL
// calls.
namespace hvd_order {

namespace {

// Smaller copies are not worth waking a thread that competes for the cores.
constexpr std::int64_t kWorthwhileBytes = 256 << 10;

// Copies in pieces that ATen does not spread over threads: those belong to the training.
void copyInPieces(const at::Tensor& to, const at::Tensor& from, double scale) {
  const at::Tensor target = to.as_strided({to.numel()}, {1});
  const at::Tensor source = from.as_strided({from.numel()}, {1});
  const at::Tensor factor = at::native::wrapped_scalar_tensor(scale);
  for (std::int64_t at = 0; at < target.numel(); at += at::internal::GRAIN_SIZE) {
    const std::int64_t length = std::min(at::internal::GRAIN_SIZE, target.numel() - at);
    at::Tensor piece = target.narrow(0, at, length);
    at::mul_out(piece, source.narrow(0, at, length), factor);
  }
}

} // namespace

GradientCopier::~GradientCopier() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  wakeUp_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

bool GradientCopier::takes(const at::Tensor& to, const at::Tensor& from) {
  return to.device().is_cpu() && from.device().is_cpu() && from.layout() == at::kStrided &&
      to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
      from.is_non_overlapping_and_dense() &&
      to.numel() * static_cast<std::int64_t>(to.element_size()) >= kWorthwhileBytes;
}

void GradientCopier::copy(at::Tensor to, at::Tensor from, double scale, Then then) {
  const std::scoped_lock lock(mutex_);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
  orders_.push_back({std::move(to), std::move(from), scale, std::move(then)});
  wakeUp_.notify_one();
}

void GradientCopier::release() {
  std::vector<at::Tensor> released;
  const std::scoped_lock lock(mutex_);
  released.swap(copied_);
}

void GradientCopier::run() {
  nameThisThread("hvdo copier");
  const at::NoGradGuard noGrad;
  std::unique_lock lock(mutex_);
  while (true) {
    wakeUp_.wait(lock, [this] { return stop_ || !orders_.empty(); });
    if (stop_) {
      return; // the destructor releases the orders that are left
    }
    Order order = std::move(orders_.front());
    orders_.pop_front();
    lock.unlock();
    copyInPieces(order.to, order.from, order.scale);
    order.then();
    order.then = nullptr;
    order.to = at::Tensor();
    lock.lock();
    copied_.push_back(std::move(order.from));
  }
}

} // namespace hvd_order
