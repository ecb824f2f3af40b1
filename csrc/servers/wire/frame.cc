#include "servers/wire/frame.h"

#include <array>
#include <concepts>

namespace hvd_order {

namespace {

constexpr std::uint32_t kMagic = 0x4F445648; // "HVDO" on the wire
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kCheckedBytes = kFrameHeaderBytes - sizeof(std::uint32_t);

class FieldWriter {
 public:
  explicit FieldWriter(std::span<std::byte> out) : out_(out) {}

  template <std::unsigned_integral T>
  void put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_[at_++] = static_cast<std::byte>(value >> (8 * i));
    }
  }
  [[nodiscard]] std::size_t at() const {
    return at_;
  }

 private:
  std::span<std::byte> out_;
  std::size_t at_ = 0;
};

class FieldReader {
 public:
  explicit FieldReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <std::unsigned_integral T>
  T get() {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value |= std::to_integer<std::uint64_t>(bytes_[at_++]) << (8 * i);
    }
    return static_cast<T>(value);
  }
  [[nodiscard]] std::size_t at() const {
    return at_;
  }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

constexpr std::array<std::uint32_t, 256> makeCrcTable() {
  constexpr std::uint32_t kPolynomial = 0x82F63B78; // reflected
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest & 1) != 0 ? (rest >> 1) ^ kPolynomial : rest >> 1;
    }
    table[byte] = rest;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kCrcTable = makeCrcTable();

/// Takes the same time wherever the numbers differ, so that no peer can find a session piece by
/// piece.
bool isSameSession(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t difference = a ^ b;
  return ((difference | (0 - difference)) >> 63) == 0;
}

void checkNumber(std::uint64_t number, std::uint64_t next) {
  if (number > next) {
    throw FrameError(concat(
        "frame ", number, " came when frame ", next, " was due: ", number - next, " were lost"));
  }
  if (number < next) {
    throw FrameError(concat("frame ", number, " came when ", next, " was due: it came twice"));
  }
}

} // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes) {
  std::uint32_t rest = ~std::uint32_t{0};
  for (const std::byte byte : bytes) {
    rest = (rest >> 8) ^ kCrcTable[(rest & 0xFF) ^ std::to_integer<std::uint32_t>(byte)];
  }
  return ~rest;
}

void write(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out) {
  FieldWriter fields(out);
  fields.put(kMagic);
  fields.put(kVersion);
  fields.put(static_cast<std::uint8_t>(header.kind));
  fields.put(header.flags);
  fields.put(header.session);
  fields.put(header.number);
  fields.put(header.model);
  fields.put(header.layout);
  fields.put(header.slice);
  fields.put(header.round);
  fields.put(header.map);
  fields.put(header.payloadBytes);
  fields.put(header.argument);
  HVDO_CHECK(fields.at() == kCheckedBytes, "a header of ", fields.at(), " bytes");
  fields.put(crc32c(out.first<kCheckedBytes>()));
}

// Magic number and version are checked first, because another protocol or version may have its
// check elsewhere. Fields behind a correct check are what the sender meant.
FrameHeader parse(std::span<const std::byte, kFrameHeaderBytes> bytes, const FrameLimits& limits) {
  FieldReader fields(bytes);
  if (const auto magic = fields.get<std::uint32_t>(); magic != kMagic) {
    throw FrameError(concat(
        "not a frame: the magic number is ", std::hex, magic, ", expected ", kMagic,
        " (hexadecimal)"));
  }
  if (const auto version = fields.get<std::uint8_t>(); version != kVersion) {
    throw FrameError(concat(
        "a frame of version ", int{version}, ", this process speaks version ", int{kVersion},
        "; all need the same hvd_order"));
  }
  const auto check = FieldReader(bytes.last<sizeof(std::uint32_t)>()).get<std::uint32_t>();
  if (const std::uint32_t expected = crc32c(bytes.first<kCheckedBytes>()); check != expected) {
    throw FrameError(concat(
        "a damaged frame: its check is ", std::hex, check, ", of its bytes it is ", expected,
        " (hexadecimal)"));
  }

  const auto kind = fields.get<std::uint8_t>();
  if (kind < static_cast<std::uint8_t>(FrameKind::kControl) ||
      kind > static_cast<std::uint8_t>(kLastFrameKind)) {
    throw FrameError(concat("a frame of kind ", int{kind}, ", which is unknown"));
  }
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.flags = fields.get<std::uint16_t>();
  if ((header.flags & ~kFrameFlags) != 0) {
    throw FrameError(concat("a frame with unknown flags: ", std::hex, header.flags));
  }
  header.session = fields.get<std::uint64_t>();
  if (!isSameSession(header.session, limits.session)) {
    throw FrameError("a frame of another session: its sender is not the peer of this connection");
  }
  header.number = fields.get<std::uint64_t>();
  checkNumber(header.number, limits.nextNumber);
  header.model = fields.get<std::uint32_t>();
  header.layout = fields.get<std::uint32_t>();
  header.slice = fields.get<std::uint32_t>();
  header.round = fields.get<std::uint32_t>();
  header.map = fields.get<std::uint32_t>();
  header.payloadBytes = fields.get<std::uint64_t>();
  if (header.payloadBytes > limits.largestPayload) {
    throw FrameError(concat(
        "a frame with a payload of ", header.payloadBytes, " bytes; at most ",
        limits.largestPayload, " are allowed"));
  }
  header.argument = fields.get<std::uint64_t>();
  HVDO_CHECK(fields.at() == kCheckedBytes, "a header of ", fields.at(), " bytes");
  return header;
}

} // namespace hvd_order
