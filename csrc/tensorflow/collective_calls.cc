#include "tensorflow/collective_calls.h"

#include <utility>

namespace hvd_order::tensorflow {

namespace {

constexpr const char* kClosed =
    "NotInitialized: Horovod has not been initialized or has been shut down; use hvd.init()";

} // namespace

CollectiveCalls& CollectiveCalls::instance() {
  static auto* calls = new CollectiveCalls; // never destroyed: TensorFlow's threads outlive main()
  return *calls;
}

void CollectiveCalls::submit(
    std::unique_ptr<OpContext> context,
    std::int64_t description,
    std::int64_t turns) {
  auto call = std::make_unique<CollectiveCall>();
  call->description = description;
  for (int i = 0; i < context->inputs() - turns; ++i) {
    call->inputs.push_back(context->input(i));
  }
  call->context = std::move(context);
  {
    const std::scoped_lock lock(mutex_);
    if (open_) {
      calls_.push_back(std::move(call));
      wakeUp_.notify_one();
      return;
    }
  }
  call->context->fail(Code::kFailedPrecondition, kClosed);
}

std::unique_ptr<CollectiveCall> CollectiveCalls::next() {
  std::unique_lock lock(mutex_);
  wakeUp_.wait(lock, [this] { return !open_ || !calls_.empty(); });
  if (!open_) {
    return nullptr;
  }
  std::unique_ptr<CollectiveCall> call = std::move(calls_.front());
  calls_.pop_front();
  return call;
}

void CollectiveCalls::open() {
  const std::scoped_lock lock(mutex_);
  open_ = true;
}

void CollectiveCalls::close() {
  std::deque<std::unique_ptr<CollectiveCall>> left;
  {
    const std::scoped_lock lock(mutex_);
    open_ = false;
    left.swap(calls_);
    wakeUp_.notify_all();
  }
  for (const auto& call : left) {
    call->context->fail(Code::kFailedPrecondition, kClosed);
  }
}

} // namespace hvd_order::tensorflow
