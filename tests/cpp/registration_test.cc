#include "servers/wire/registration.h"

#include <limits>
#include <random>

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

const Registration kRegistration{
    true,
    {{16, ElementType::kFloat32, {{0, 1, 0}, {2, 2, 1}}}, {4, ElementType::kFloat32, {}}}};

// Numbers as they travel.
std::vector<std::byte> words(const std::vector<std::uint32_t>& numbers) {
  ByteWriter out;
  for (const std::uint32_t number : numbers) {
    out.put(number);
  }
  return out.bytes();
}

std::string refusal(const std::vector<std::uint32_t>& numbers) {
  return CHECK_THROWS(FrameError, readRegistration(words(numbers), 1024));
}

} // namespace

TEST(whatIsWrittenIsRead) {
  CHECK(readRegistration(writeRegistration(kRegistration), 16) == kRegistration);
  CHECK(readRegistration(writeRegistration({}), 0) == Registration{});
  const std::vector<SliceOwners> places{{0, kNoServer}, {65534, 3}};
  CHECK(readOwners(writeOwners(places)) == places);
  UpdateRule rule{.kind = RuleKind::kRmsprop, .lr = std::numeric_limits<double>::infinity()};
  rule.nesterov = rule.amsgrad = rule.centered = rule.maximize = true;
  rule.initialAccumulator = -0.0;
  CHECK(readRules(writeRules(std::vector<UpdateRule>{rule, {}})) == std::vector{rule, {}});
}

TEST(registrationsThatCannotBeAreRefused) {
  constexpr std::uint32_t kMost = ~std::uint32_t{0};
  CHECK_CONTAINS(refusal({2, 0}), "that is none");
  CHECK_CONTAINS(refusal({0, 1}), "1 slices in 0 bytes");
  CHECK_CONTAINS(refusal({0, kMost, 4, 0, 0}), "4294967295 slices in 12 bytes");
  CHECK_CONTAINS(refusal({0, 1, 0, 0, 0}), "a slice of 0 bytes");
  CHECK_CONTAINS(refusal({0, 1, 6, 0, 0}), "a slice of 6 bytes");
  CHECK_CONTAINS(refusal({0, 1, 2048, 0, 0}), "a slice of 2048 bytes");
  CHECK_CONTAINS(refusal({0, 1, 4, 4, 0}), "element type 4");
  CHECK_CONTAINS(refusal({0, 1, 4, 256, 0}), "element type 256");
  CHECK_CONTAINS(refusal({0, 1, 4, 0, kMost}), "4294967295 segments");
  CHECK_CONTAINS(refusal({1, 1, 8, 0, 1, 1, 2, 0}), "a segment of 2 elements at 1");
  CHECK_CONTAINS(refusal({1, 1, 8, 0, 1, kMost, 2, 0}), "a segment of 2 elements");
  CHECK_CONTAINS(refusal({1, 1, 8, 0, 2, 0, 2, 0, 1, 1, 0}), "a segment of 1 elements at 1");
  CHECK_CONTAINS(refusal({1, 1, 8, 1, 0}), "float32 only");
  CHECK_CONTAINS(refusal({0, 0, 0}), "longer");
}

TEST(placesThatCannotBeAreRefused) {
  CHECK_THROWS(FrameError, readOwners(writeOwners(std::vector<SliceOwners>{{1, 1}})));
  CHECK_THROWS(FrameError, readOwners(writeOwners(std::vector<SliceOwners>{{kNoServer, 1}})));
  CHECK_THROWS(FrameError, readOwners(std::vector<std::byte>(3)));
}

TEST(aPayloadThatWasCutOrMixedIsReadAsSomethingOrRefused) {
  std::mt19937 random(7);
  const std::vector<std::vector<std::byte>> whole{
      writeRegistration(kRegistration), writeOwners(std::vector<SliceOwners>{{0, 1}, {1, 0}}),
      writeRules(std::vector<UpdateRule>{{}, {.kind = RuleKind::kAdam}})};
  for (int i = 0; i < 100'000; ++i) {
    auto bytes = whole[random() % 3];
    bytes.resize(random() % 8 == 0 ? random() % (bytes.size() + 8) : bytes.size());
    for (std::uint32_t changes = random() % 3; changes > 0 && !bytes.empty(); --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    const auto reads = [&](auto read) {
      try {
        read();
      } catch (const FrameError&) {
        return;
      }
    };
    reads([&] {
      const Registration made = readRegistration(bytes, 64);
      CHECK(writeRegistration(made) == bytes);
    });
    reads([&] { CHECK(writeOwners(readOwners(bytes)) == bytes); });
    reads([&] { CHECK_EQUAL(readRules(bytes).size(), bytes.size() / 88); });
  }
}

} // namespace hvd_order
