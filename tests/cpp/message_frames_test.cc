#include "transport/message_frames.h"

#include "base/error.h"
#include "check.h"
#include "transport/control_words.h"

namespace hvd_order {

namespace {

ControlMessage numbered(std::size_t words) {
  ControlMessage message{MessageKind::kSlices, {}};
  for (std::size_t i = 0; i < words; ++i) {
    message.words.push_back(static_cast<std::uint32_t>(i + 1));
  }
  return message;
}

/// Adds frames one after the other. @return the last message that came of it.
std::optional<ControlMessage> added(Assembly& assembly, const std::vector<std::uint32_t>& words) {
  std::optional<ControlMessage> last;
  for (std::size_t at = 0; at < words.size(); at += kFrameWords) {
    last = assembly.add(3, std::span(words).subspan(at, kFrameWords));
  }
  return last;
}

std::string refused(const std::vector<std::uint32_t>& words) {
  Assembly assembly;
  return CHECK_THROWS(MalformedMessage, added(assembly, words));
}

} // namespace

TEST(aMessageOfAnyLengthComesTogether) {
  Assembly assembly;
  for (const std::size_t words : {0, 1, 124, 125, 126, 252, 253, 1000}) {
    const std::optional<ControlMessage> message = added(assembly, frameWords(numbered(words)));
    CHECK(message.has_value());
    CHECK(message->words == numbered(words).words);
  }
}

TEST(aFrameThatIsNoneNamesItsSender) {
  std::vector<std::uint32_t> words = frameWords(numbered(3));
  words.back() = 7;
  CHECK_CONTAINS(refused(words), "rank 3 sent a malformed control message");
  words.back() = kArrived;
  words[0] = 1000;
  CHECK_CONTAINS(refused(words), "kind 1000");
}

TEST(aLengthIsComparedWithWhatCame) {
  std::vector<std::uint32_t> words = frameWords(numbered(3));
  words[1] = 0xfffffff0;
  CHECK_CONTAINS(refused(words), "claims to have 4294967280 words");
  words[1] = 2;
  CHECK_CONTAINS(refused(words), "more words than the message");
}

TEST(aTextIsAsLongAsItsWords) {
  for (const std::string text : {"", "a", "abcd", "abcde"}) {
    CHECK_EQUAL(unwrapText(1, wrapText(text)), text);
  }
  ControlMessage message = wrapText("abcde");
  message.words[0] = 4000;
  CHECK_CONTAINS(
      CHECK_THROWS(MalformedMessage, unwrapText(2, message)), "a text of 4000 bytes in 2 words");
  message.words.clear();
  CHECK_CONTAINS(CHECK_THROWS(MalformedMessage, unwrapText(2, message)), "it ends before");
  message.kind = MessageKind::kReply;
  CHECK_CONTAINS(CHECK_THROWS(MalformedMessage, unwrapText(2, message)), "a text was expected");
}

TEST(wordsAreReadAsFarAsTheyGo) {
  const ControlMessage message{MessageKind::kQuery, {1, 9, 2, 3}};
  ControlWords words(5, message);
  CHECK_EQUAL(words.nextRank(2, "a rank"), 1);
  CHECK_CONTAINS(
      CHECK_THROWS(MalformedMessage, words.nextRank(2, "a rank")), "a rank is 9, of 2 ranks");
  CHECK_CONTAINS(CHECK_THROWS(MalformedMessage, words.rest(3, "gradients")), "2 words are left");
  CHECK_THROWS(MalformedMessage, words.end());
  CHECK_EQUAL(words.rest(2, "gradients").size(), std::size_t{2});
  CHECK_CONTAINS(CHECK_THROWS(MalformedMessage, words.next64("a count")), "rank 5");
}

} // namespace hvd_order
