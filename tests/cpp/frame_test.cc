#include "servers/wire/frame.h"

#include <algorithm>
#include <array>
#include <random>

#include "check.h"

namespace hvd_order {

namespace {

using Bytes = std::array<std::byte, kFrameHeaderBytes>;

constexpr FrameHeader kHeader{
    .kind = FrameKind::kPush,
    .flags = 0,
    .session = 0x0123456789ABCDEF,
    .number = 5,
    .model = 0x11121314,
    .layout = 0x21222324,
    .slice = 0x31323334,
    .round = 0x41424344,
    .map = 0x51525354,
    .payloadBytes = 4096,
    .argument = 0x6162636465666768};

constexpr FrameLimits kLimits{
    .session = 0x0123456789ABCDEF,
    .nextNumber = 5,
    .largestPayload = 4096};

Bytes written(const FrameHeader& header) {
  Bytes bytes{};
  write(header, bytes);
  return bytes;
}

void putCheck(Bytes& bytes) {
  const std::uint32_t check = crc32c(std::span(bytes).first<60>());
  for (std::size_t i = 0; i < 4; ++i) {
    bytes[60 + i] = static_cast<std::byte>(check >> (8 * i));
  }
}

// `kHeader` with one byte changed and a check that fits, so that a later test must find it.
Bytes withByte(std::size_t at, std::uint8_t value) {
  Bytes bytes = written(kHeader);
  bytes[at] = std::byte{value};
  putCheck(bytes);
  return bytes;
}

std::string refusal(const Bytes& bytes, const FrameLimits& limits = kLimits) {
  return CHECK_THROWS(FrameError, parse(bytes, limits));
}

FrameHeader withSession(std::uint64_t session) {
  FrameHeader header = kHeader;
  header.session = session;
  return header;
}

FrameHeader numbered(std::uint64_t number) {
  FrameHeader header = kHeader;
  header.number = number;
  return header;
}

} // namespace

TEST(whatIsWrittenIsRead) {
  CHECK(parse(written(kHeader), kLimits) == kHeader);
  const FrameHeader nothing;
  CHECK(parse(written(nothing), {0, 0, 0}) == nothing);
  constexpr std::uint64_t kMost = ~std::uint64_t{0};
  constexpr std::uint32_t kWord = ~std::uint32_t{0};
  const FrameHeader all{kLastFrameKind, kFrameFlags, kMost, kMost, kWord, kWord,
                        kWord,          kWord,       kWord, kMost, kMost};
  CHECK(parse(written(all), {kMost, kMost, kMost}) == all);
}

TEST(theBytesOnTheWireStayAsTheyAre) {
  const std::vector<int> expected{
      'H',  'V',  'D',  'O',  1,    2,    0,    0,                // magic version kind flags
      0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01,             // session
      5,    0,    0,    0,    0,    0,    0,    0,                // number
      0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21,             // model layout
      0x34, 0x33, 0x32, 0x31, 0x44, 0x43, 0x42, 0x41,             // slice round
      0x54, 0x53, 0x52, 0x51, 0,    0x10, 0,    0,    0, 0, 0, 0, // map payloadBytes
      0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61};            // argument
  std::vector<int> actual;
  for (const std::byte byte : written(kHeader)) {
    actual.push_back(std::to_integer<int>(byte));
  }
  actual.resize(60);
  CHECK_EQUAL(actual, expected);
}

TEST(theCheckIsTheOneOfTheStandard) {
  // RFC 3720, B.4, and the usual "123456789".
  const auto of = [](const std::string& text) {
    return crc32c(std::as_bytes(std::span(text.data(), text.size())));
  };
  CHECK_EQUAL(of(std::string(32, '\0')), 0x8A9136AAU);
  CHECK_EQUAL(of(std::string(32, '\xFF')), 0x62A8AB43U);
  CHECK_EQUAL(of("123456789"), 0xE3069283U);
  CHECK_EQUAL(of(""), 0U);
}

TEST(damageIsNamed) {
  CHECK_CONTAINS(refusal(withByte(0, 'X')), "magic number is 4f445658");
  CHECK_CONTAINS(refusal(withByte(4, 2)), "version 2, this process speaks version 1");
  CHECK_CONTAINS(refusal(withByte(5, 0)), "kind 0,");
  const int unknown = static_cast<int>(kLastFrameKind) + 1;
  CHECK_CONTAINS(
      refusal(withByte(5, static_cast<std::uint8_t>(unknown))), concat("kind ", unknown, ","));
  CHECK_CONTAINS(refusal(withByte(5, 255)), "kind 255");
  CHECK_CONTAINS(refusal(withByte(6, 8)), "unknown flags: 8");
  CHECK_CONTAINS(refusal(withByte(7, 0x80)), "unknown flags: 8000");
  CHECK_CONTAINS(refusal(withByte(46, 1)), "payload of 69632 bytes; at most 4096");
  for (std::size_t at = 5; at < kFrameHeaderBytes; ++at) {
    Bytes bytes = written(kHeader);
    bytes[at] ^= std::byte{0x10};
    CHECK_CONTAINS(refusal(bytes), "damaged frame: its check");
  }
}

TEST(aFrameThatWasLostOrCameTwiceIsFound) {
  CHECK_CONTAINS(refusal(written(numbered(7))), "frame 7 came when frame 5 was due: 2 were lost");
  CHECK_CONTAINS(refusal(written(numbered(4))), "frame 4 came when 5 was due: it came twice");
  // A copy of an earlier frame, of a connection that was open for long.
  CHECK_CONTAINS(
      refusal(written(numbered(~std::uint64_t{0}))),
      "frame 18446744073709551615 came when frame 5");
}

TEST(anotherSessionIsRefusedWhateverDiffersAndNothingOfItIsSaid) {
  const std::string first = refusal(written(withSession(kHeader.session ^ 1)));
  CHECK_CONTAINS(first, "another session");
  for (int bit = 0; bit < 64; ++bit) {
    const std::uint64_t other = kHeader.session ^ (std::uint64_t{1} << bit);
    CHECK_EQUAL(refusal(written(withSession(other))), first);
  }
  CHECK_EQUAL(refusal(written(withSession(0))), first);
  CHECK_EQUAL(refusal(written(withSession(~kHeader.session))), first);
}

TEST(aHundredThousandMutatedFramesAreReadAsWrittenOrRefused) {
  std::mt19937_64 random(20240607);
  const auto below = [&](std::uint64_t end) { return random() % end; };
  int read = 0;
  int refused = 0;
  for (int i = 0; i < 100'000; ++i) {
    const FrameHeader header{
        .kind = static_cast<FrameKind>(1 + below(static_cast<int>(kLastFrameKind))),
        .session = random(),
        .number = random() >> below(64),
        .model = static_cast<std::uint32_t>(random()),
        .layout = static_cast<std::uint32_t>(random()),
        .slice = static_cast<std::uint32_t>(random()),
        .round = static_cast<std::uint32_t>(random()),
        .map = static_cast<std::uint32_t>(random()),
        .payloadBytes = random() >> below(64),
        .argument = random()};
    const FrameLimits limits{header.session, header.number, header.payloadBytes};
    const Bytes before = written(header);
    Bytes bytes = before;
    for (std::uint64_t change = 0, changes = below(4); change < changes; ++change) {
      const std::size_t at = below(kFrameHeaderBytes);
      switch (below(3)) {
        case 0:
          bytes[at] ^= std::byte{1} << static_cast<int>(below(8));
          break;
        case 1:
          bytes[at] = static_cast<std::byte>(random());
          break;
        default: // cut short
          std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.end(), std::byte{0});
      }
    }
    // Every second one has a check that fits: then the fields have to be judged, and those that may
    // have any value are read as the mutation left them.
    const bool fits = below(2) == 0;
    if (fits) {
      putCheck(bytes);
    }
    try {
      const FrameHeader parsed = parse(bytes, limits);
      ++read;
      CHECK(written(parsed) == bytes);
      CHECK(parsed.session == header.session && parsed.number == header.number);
      CHECK(parsed.payloadBytes <= header.payloadBytes);
      CHECK(fits || parsed == header);
    } catch (const FrameError&) {
      ++refused;
      CHECK(bytes != before);
    }
  }
  CHECK(read > 25'000); // both ways were taken often
  CHECK(refused > 25'000);
}

} // namespace hvd_order
