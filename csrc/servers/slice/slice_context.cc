#include "servers/slice/slice_context.h"

#include <utility>

#include "servers/slice/served_model.h"

// Derives what holds for one slice from the server's options and the model's registration.
//
// Two rules depend on who updates parameters. A server that only sums is synchronous whatever the
// options say, because a sum needs every worker. And only parameters may be answered before the
// replica has them: a lost update is a small error of a parameter, a lost gradient a wrong sum.
namespace hvd_order {

namespace {
// Copies for a replica that may lag go when no other frame waits.
constexpr std::uint64_t kWhenIdle = Connection::kLast - 1;
} // namespace

const ServerOptions& SliceContext::options() const {
  return model.room.options;
}

const Peers& SliceContext::peers() const {
  return model.room.peers;
}

std::uint32_t SliceContext::sizeBytes() const {
  return model.registration.slices[index].sizeBytes;
}

PushWindows::Key SliceContext::key() const {
  return {index, model.id, model.layout};
}

Consistency SliceContext::consistency() const {
  return model.registration.serversUpdate ? options().consistency : Consistency::kSynchronous;
}

bool SliceContext::mayLag() const {
  return model.registration.serversUpdate && options().divergenceBound > 0;
}

bool SliceContext::asksFirst() const {
  return options().delayBound && consistency() == Consistency::kAsynchronous;
}

std::uint64_t SliceContext::urgency() const {
  return options().urgencyOf(index);
}

std::uint64_t SliceContext::replicaUrgency() const {
  return options().divergenceBound > 0 ? kWhenIdle : urgency();
}

FrameHeader SliceContext::about(FrameKind kind) const {
  return model.about(kind, index);
}

void SliceContext::send(Peer to, std::uint64_t urgency, const FrameHeader& header, Payload payload)
    const {
  peers().send(to, urgency, header, std::move(payload));
}

} // namespace hvd_order
