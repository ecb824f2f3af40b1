#include "server/push_windows.h"

#include "server/served_slice.h"

namespace hvd_order {

namespace {
constexpr double kNewest = 0.25; // share of the newest measurement in a worker's rate
} // namespace

bool PushWindows::hasRoom(int worker) const {
  const std::scoped_lock lock(mutex_);
  return of(worker).admitted < kMostAdmitted;
}

double PushWindows::expectedSeconds(int worker, ByteCount bytes) const {
  const std::scoped_lock lock(mutex_);
  const Worker& each = of(worker);
  return static_cast<double>(each.bytes + bytes) / (each.rate > 0 ? each.rate : 1);
}

bool PushWindows::take(int worker, ByteCount bytes, double now) {
  const std::scoped_lock lock(mutex_);
  Worker& each = of(worker);
  if (each.admitted >= kMostAdmitted) {
    return false;
  }
  if (each.admitted++ == 0) {
    each.since = now;
  }
  each.bytes += bytes;
  return true;
}

void PushWindows::giveBack(int worker, ByteCount bytes, bool came, double now) {
  const std::scoped_lock lock(mutex_);
  Worker& each = of(worker);
  --each.admitted;
  each.bytes -= bytes;
  if (came && now > each.since) {
    const double rate = static_cast<double>(bytes) / (now - each.since);
    each.rate = each.rate > 0 ? each.rate + kNewest * (rate - each.rate) : rate;
    each.since = now;
  }
}

void PushWindows::await(
    const std::vector<int>& workers,
    const std::shared_ptr<ServedSlice>& slice) {
  const std::scoped_lock lock(mutex_);
  for (const int worker : workers) {
    of(worker).waiting[slice->key()] = slice;
  }
}

std::shared_ptr<ServedSlice> PushWindows::next(int worker) {
  const std::scoped_lock lock(mutex_);
  Worker& each = of(worker);
  while (each.admitted < kMostAdmitted && !each.waiting.empty()) {
    const auto slice = each.waiting.begin()->second.lock();
    each.waiting.erase(each.waiting.begin());
    if (slice) {
      return slice;
    }
  }
  return nullptr;
}

} // namespace hvd_order
