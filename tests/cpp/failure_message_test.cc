#include "engine/failure_message.h"

#include <string>

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

template <typename T>
std::string carried(const std::string& text) {
  return CHECK_THROWS(
      T, std::rethrow_exception(unpackFailure(packFailure(std::make_exception_ptr(T(text))))));
}

} // namespace

TEST(aFailureKeepsItsClassAndItsText) {
  CHECK_EQUAL(carried<PeerLost>("rank 1 is gone"), std::string("rank 1 is gone"));
  CHECK_EQUAL(carried<TransferTimeout>("nothing moved"), std::string("nothing moved"));
  for (const std::size_t size : {0, 1, 3, 4, 5, 440}) {
    const std::string text(size, 'x');
    CHECK_EQUAL(carried<CollectiveError>(text), text);
  }
}

TEST(aLongTextIsCutBetweenCharacters) {
  CHECK_EQUAL(carried<PeerLost>(std::string(1000, 'x')), std::string(440, 'x'));
  for (std::size_t before = 434; before < 442; ++before) { // Gloo ends its errors with this picture
    const std::string start(before, 'x');
    const std::string whole = start + "\U0001F3D6" + "xxxx";
    const std::string wanted = before <= 436 ? whole.substr(0, 440) : start.substr(0, 440);
    CHECK_EQUAL(carried<PeerLost>(whole), wanted);
  }
}

TEST(wordsThatNobodyPackedAreAFailureToo) {
  for (const std::vector<std::uint32_t>& words :
       {std::vector<std::uint32_t>{}, {1}, {77, 4000, 0x64636261}}) {
    CHECK_THROWS(CollectiveError, std::rethrow_exception(unpackFailure(words)));
  }
  CHECK_EQUAL(
      CHECK_THROWS(PeerLost, std::rethrow_exception(unpackFailure({1, 4000, 0x64636261}))),
      std::string("abcd")); // a size that is not true
}

} // namespace hvd_order
