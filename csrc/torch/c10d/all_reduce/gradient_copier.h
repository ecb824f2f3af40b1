#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hvd_order {

/// Copies large CPU gradients into their buffers in parallel to the backward pass, as a device's
/// stream would: the training thread continues at once.
///
/// Thread safety: every method may be called from any thread.
class GradientCopier final {
 public:
  using Then = std::function<void()>;

  GradientCopier() = default;
  ~GradientCopier();
  GradientCopier(const GradientCopier&) = delete;
  GradientCopier& operator=(const GradientCopier&) = delete;

  /// Whether `copy` supports these tensors and the copy is large enough to be worth another
  /// thread.
  [[nodiscard]] static bool takes(const at::Tensor& to, const at::Tensor& from);

  /// Computes to = scale * from, one copy after the other, in the order of the calls; then calls
  /// `then`. `from` is kept until `release`.
  void copy(at::Tensor to, at::Tensor from, double scale, Then then);

  /// Releases the gradients that have been copied. A tensor that Python knows must be released by
  /// a thread that holds the GIL; the copying thread never does.
  void release();

 private:
  struct Order {
    at::Tensor to;
    at::Tensor from;
    double scale = 1.0;
    Then then;
  };

  void run();

  std::mutex mutex_; // guards all members below; not held while copying
  std::condition_variable wakeUp_;
  std::deque<Order> orders_;
  std::vector<at::Tensor> copied_;
  bool stop_ = false;
  std::thread thread_; // started by the first order
};

} // namespace hvd_order
