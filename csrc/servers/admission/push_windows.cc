#include "servers/admission/push_windows.h"

// Flow control of pushes to this server, by sender: a worker, or a helper in the server's second
// instance.
//
// A slice admits one push (or group) at a time, and other workers wait for it. An admission to a
// sender whose connection is busy would block the slice without use, so each sender gets at most
// kMostAdmitted at once: one on the connection, and one whose admission is on its way.
//
// Invariant: `take` and `giveBack` come in pairs, also for pushes that never arrive. Only arrivals
// are measured: bytes over the time since the connection became busy or since the arrival before.
// The rate is a moving average; expectedSeconds divides all admitted bytes and the new push by it.
//
// A slice that finds no room registers with `await`. When a sender gives room back, `next` returns
// its waiting slices, the most urgent first, while room lasts.
namespace hvd_order {

namespace {
constexpr double kNewest = 0.25; // weight of the newest measurement in a sender's rate
} // namespace

double PushWindows::expectedSeconds(int sender, ByteCount bytes) const {
  const std::scoped_lock lock(mutex_);
  const auto found = senders_.find(sender);
  const Sender each = found == senders_.end() ? Sender{} : found->second;
  return static_cast<double>(each.bytes + bytes) / (each.rate > 0 ? each.rate : 1);
}

bool PushWindows::take(int sender, ByteCount bytes, double now) {
  const std::scoped_lock lock(mutex_);
  Sender& each = senders_[sender];
  if (each.admitted >= kMostAdmitted) {
    return false;
  }
  if (each.admitted++ == 0) {
    each.since = now;
  }
  each.bytes += bytes;
  return true;
}

void PushWindows::giveBack(int sender, ByteCount bytes, bool came, double now) {
  const std::scoped_lock lock(mutex_);
  Sender& each = senders_[sender];
  --each.admitted;
  each.bytes -= bytes;
  if (came && now > each.since) {
    const double rate = static_cast<double>(bytes) / (now - each.since);
    each.rate = each.rate > 0 ? each.rate + kNewest * (rate - each.rate) : rate;
    each.since = now;
  }
}

void PushWindows::await(
    const std::vector<int>& senders,
    const Key& key,
    const std::shared_ptr<WaitingSlice>& slice) {
  const std::scoped_lock lock(mutex_);
  for (const int sender : senders) {
    senders_[sender].waiting[key] = slice;
  }
}

std::shared_ptr<PushWindows::WaitingSlice> PushWindows::next(int sender) {
  const std::scoped_lock lock(mutex_);
  Sender& each = senders_[sender];
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
