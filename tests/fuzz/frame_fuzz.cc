// Whatever 64 bytes come, parse() refuses them with FrameError, or reads what write() would write
// as the same bytes, within the limits.

#include <algorithm>
#include <array>
#include <cstdlib>
#include <span>

#include "servers/wire/frame.h"

using namespace hvd_order;

namespace {

using Bytes = std::array<std::byte, kFrameHeaderBytes>;

// What a fuzzer does not find by trying, as bits of the input's first byte.
constexpr unsigned kFitCheck = 1;
constexpr unsigned kFitSession = 2;
constexpr unsigned kFitNumber = 4;
constexpr unsigned kFitStart = 8; // magic and version
constexpr unsigned kFitFlags = 16;
constexpr unsigned kChoiceBits = 5; // what is above them chooses the largest payload

std::uint64_t number(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  }
  return value;
}

void require(bool condition) {
  if (!condition) {
    std::abort(); // the fuzzer keeps the input
  }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size));
  if (input.empty()) {
    return 0;
  }
  const auto choices = std::to_integer<unsigned>(input[0]);
  const std::span<const std::byte> frame =
      input.subspan(1, std::min(input.size() - 1, kFrameHeaderBytes));
  Bytes bytes{}; // a shorter input is a frame that was cut short
  std::copy(frame.begin(), frame.end(), bytes.begin());

  if ((choices & kFitStart) != 0) {
    Bytes honest;
    write({}, honest);
    std::copy_n(honest.begin(), 5, bytes.begin());
  }
  if ((choices & kFitFlags) != 0) {
    std::fill_n(bytes.begin() + 6, 2, std::byte{0});
  }
  const std::span<std::byte> view(bytes);
  const FrameLimits limits{
      .session = (choices & kFitSession) != 0 ? number(view.subspan(8, 8)) : 1,
      .nextNumber = (choices & kFitNumber) != 0 ? number(view.subspan(16, 8)) : 1,
      .largestPayload = std::uint64_t{1} << (8 * (choices >> kChoiceBits))};
  if ((choices & kFitCheck) != 0) {
    const std::uint32_t check = crc32c(view.first(60));
    for (std::size_t i = 0; i < 4; ++i) {
      bytes[60 + i] = static_cast<std::byte>(check >> (8 * i));
    }
  }

  try {
    const FrameHeader header = parse(bytes, limits);
    Bytes again;
    write(header, again);
    require(again == bytes);
    require(header.session == limits.session && header.number == limits.nextNumber);
    require(header.payloadBytes <= limits.largestPayload);
  } catch (const FrameError&) {
    return 0; // any other exception ends the run
  }
  return 0;
}
