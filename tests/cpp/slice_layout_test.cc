#include "scheduler/slice_layout.h"

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

// One slice a line: "name buffer@offset+size".
std::vector<std::string> picture(const SliceLayout& layout) {
  std::vector<std::string> lines;
  for (SliceIndex i = 0; i < layout.slices().size(); ++i) {
    const Slice& s = layout.slices()[i];
    lines.push_back(
        concat(layout.sliceName(i), " ", s.buffer, "@", s.offsetBytes, "+", s.sizeBytes));
  }
  return lines;
}

using Lines = std::vector<std::string>;
using Tensors = std::vector<TensorSpec>;

constexpr bool kSplit = true;

// Two buffers, whose tensors alternate; tensors of several slices and slices of several tensors.
const Tensors kMixed{{"a", 128, 0}, {"b", 32, 1},    {"c", 64, 0}, {"d", 32, 1},
                     {"e", 16, 0},  {"big", 320, 1}, {"f", 16, 0}};

} // namespace

TEST(partsAreAsEqualAsAlignmentAllows) {
  // 400 bytes in slices of 384: two halves, not 384 + 16.
  const SliceLayout layout({{"a", 400, 0}}, 384);
  CHECK_EQUAL(picture(layout), Lines{"a[0] 0@0+256", "a[1] 0@256+144"});
}

TEST(withoutASmallFrontSlicesAreFilledFromTheEnd) {
  //   a 16 | b 32 | c 32 | big 272 | d 16 | e 48      slices of 128
  const std::vector<TensorSpec> tensors = {{"a", 16, 0},    {"b", 32, 0}, {"c", 32, 0},
                                           {"big", 272, 0}, {"d", 16, 0}, {"e", 48, 0}};
  const SliceLayout layout(tensors, 128, /*smallFront=*/false);
  CHECK_EQUAL(
      picture(layout),
      Lines{
          "a..c 0@0+80", "big[0] 0@80+128", "big[1] 0@208+128", "big[2] 0@336+16",
          "d..e 0@352+64"});
  const SliceLayout small({{"a", 32, 0}, {"b", 32, 0}, {"c", 48, 0}}, 80, /*smallFront=*/false);
  CHECK_EQUAL(picture(small), Lines{"a 0@0+32", "b..c 0@32+80"});
}

TEST(everySquareHasItsPlace) {
  for (const ByteCount bytes : {64, 128, 1024}) {
    const SliceLayout layout(kMixed, bytes, true, kSplit);
    const std::vector<TensorId> squared = layout.squaredTensors();
    std::size_t place = 0;
    for (SliceIndex sum = 1; sum <= layout.pairs(); ++sum) {
      CHECK_EQUAL(layout.firstSquare(sum), place);
      for (const TensorId tensor : layout.tensorsOf(sum)) {
        CHECK_EQUAL(squared.at(place++), tensor);
      }
    }
    CHECK_EQUAL(squared.size(), place);
  }
}

TEST(mistakesAreNamed) {
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, SliceLayout({{"a", 16, 0}}, 63)), "least is 64");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, SliceLayout({{"a", 24, 0}}, 64)), "'a' takes 24");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, SliceLayout({{"a", 0, 0}}, 64)), "'a' takes 0");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, SliceLayout({{"a", -16, 0}}, 64)), "'a' takes -16");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, SliceLayout({{"", 16, 0}}, 64)), "needs a name");
  const ByteCount tooManySlices = ByteCount{SliceKey::kMaxSlices} * 64 + 64;
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, SliceLayout({{"a", tooManySlices, 0}}, 64)), "take larger slices");
  const ByteCount tooManyHalves = ByteCount{SliceKey::kMaxSlices} / 2 * 64;
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, SliceLayout({{"a", tooManyHalves, 0}}, 64, true, kSplit)),
      "take larger slices");
  const SliceLayout layout({{"a", 16, 0}}, 64);
  CHECK_THROWS(BrokenInvariant, layout.slicesOf(1));
  CHECK_THROWS(BrokenInvariant, layout.tensorsOf(1));
}

TEST(aSliceKeyFitsOneWord) {
  for (const SliceKey key :
       {SliceKey{0, 0}, SliceKey{255, 7}, SliceKey{3, SliceKey::kMaxSlices - 1}}) {
    CHECK_EQUAL(SliceKey::fromWord(key.word()), key);
  }
}

} // namespace hvd_order
