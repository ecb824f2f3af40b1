#include "servers/wire/group.h"

#include <algorithm>

#include "servers/wire/bytes.h"
#include "servers/wire/frame.h"

namespace hvd_order {

Payload withMembers(const Payload& sum, std::span<const Member> members) {
  ByteWriter list;
  for (const Member& member : members) {
    list.put(static_cast<std::uint32_t>(member.worker));
    list.put(member.round);
  }
  Payload both = Payload::allocate(sum.sizeBytes + list.bytes().size());
  std::copy_n(sum.data(), sum.sizeBytes, both.data());
  std::ranges::copy(list.bytes(), both.data() + sum.sizeBytes);
  return both;
}

std::pair<Payload, std::vector<Member>>
splitMembers(const Payload& payload, std::size_t sumBytes, int workers) {
  const auto most = static_cast<std::size_t>(workers);
  if (payload.sizeBytes < sumBytes + membersBytes(2) ||
      payload.sizeBytes > sumBytes + membersBytes(most) ||
      (payload.sizeBytes - sumBytes) % membersBytes(1) != 0) {
    throw FrameError(concat(
        "a sum of several workers' updates of ", payload.sizeBytes, " bytes, for ", sumBytes));
  }
  ByteReader list({payload.data() + sumBytes, payload.sizeBytes - sumBytes});
  std::vector<Member> members;
  while (list.left() > 0) {
    const auto worker = list.get<std::uint32_t>();
    const auto round = list.get<Round>();
    if (worker >= most || round == 0 ||
        (!members.empty() && static_cast<int>(worker) <= members.back().worker)) {
      throw FrameError(concat("round ", round, " of worker ", worker, " in a sum of several"));
    }
    members.push_back({static_cast<int>(worker), round});
  }
  return {Payload{payload.memory, sumBytes}, std::move(members)};
}

} // namespace hvd_order
