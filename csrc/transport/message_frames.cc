#include "transport/message_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "transport/control_words.h"

// A message begins in a frame of its own with its kind and its number of words; the words follow
// and continue in as many frames as they need. The last word of every frame is not zero. A receive
// fills its frame in order, so that word says that the frame is complete. What a message leaves
// free in its last frame is zero, so a frame that belongs elsewhere does not pass for one.
//
// A text travels as a message of kText: its number of bytes, then the bytes in words.
//
// Nothing is reserved for words that a message claims to have: memory grows with what has come.

namespace hvd_order {

namespace {

constexpr std::size_t kContentWords = kFrameWords - 1; // without the last
constexpr std::size_t kHeaderWords = 2;
constexpr auto kText = static_cast<MessageKind>(0);
constexpr auto kLastKind = MessageKind::kActivity;

bool isKnown(MessageKind kind) {
  return kind <= kLastKind || kind == kParting;
}

} // namespace

std::vector<std::uint32_t> frameWords(const ControlMessage& message) {
  HVDO_CHECK(
      message.words.size() <= kMostMessageWords, "a control message of ", message.words.size(),
      " words");
  std::vector<std::uint32_t> content{
      static_cast<std::uint32_t>(message.kind), static_cast<std::uint32_t>(message.words.size())};
  content.insert(content.end(), message.words.begin(), message.words.end());
  const std::size_t frames = (content.size() + kContentWords - 1) / kContentWords;
  std::vector<std::uint32_t> words(frames * kFrameWords, 0);
  for (std::size_t i = 0; i < frames; ++i) {
    std::uint32_t* const frame = words.data() + i * kFrameWords;
    const std::size_t at = i * kContentWords;
    std::copy_n(content.data() + at, std::min(kContentWords, content.size() - at), frame);
    frame[kContentWords] = kArrived;
  }
  return words;
}

std::optional<ControlMessage> Assembly::add(Rank from, std::span<const std::uint32_t> frame) {
  if (frame.size() != kFrameWords || frame[kContentWords] != kArrived) {
    ControlWords::refuseMessage(from, "a frame", "it does not end as frames do");
  }
  std::span<const std::uint32_t> words = frame.first(kContentWords);
  if (missing_ == 0) {
    message_ = {static_cast<MessageKind>(words[0]), {}};
    if (!isKnown(message_.kind) || words[1] > kMostMessageWords) {
      ControlWords::refuseMessage(
          from, concat("kind ", words[0]), concat("it claims to have ", words[1], " words"));
    }
    missing_ = words[1];
    words = words.subspan(kHeaderWords);
  }
  const std::size_t count = std::min(missing_, words.size());
  const auto own = words.first(count);
  message_.words.insert(message_.words.end(), own.begin(), own.end());
  missing_ -= count;
  if (std::ranges::any_of(words.subspan(count), [](std::uint32_t word) { return word != 0; })) {
    ControlWords::refuseMessage(
        from, concat("kind ", static_cast<std::uint32_t>(message_.kind)),
        "its last frame has more words than the message");
  }
  return missing_ == 0 ? std::optional(std::exchange(message_, {})) : std::nullopt;
}

ControlMessage wrapText(const std::string& text) {
  const std::size_t words = (text.size() + sizeof(std::uint32_t) - 1) / sizeof(std::uint32_t);
  ControlMessage message{kText, std::vector<std::uint32_t>(1 + words, 0)};
  message.words[0] = static_cast<std::uint32_t>(text.size());
  std::memcpy(message.words.data() + 1, text.data(), text.size());
  return message;
}

std::string unwrapText(Rank from, const ControlMessage& message) {
  ControlWords words(from, message);
  if (message.kind != kText) {
    words.refuse("a text was expected");
  }
  const std::size_t size = words.next("the length of its text");
  const std::span<const std::uint32_t> content = words.rest();
  if ((size + sizeof(std::uint32_t) - 1) / sizeof(std::uint32_t) != content.size()) {
    words.refuse(concat("a text of ", size, " bytes in ", content.size(), " words"));
  }
  return {reinterpret_cast<const char*>(content.data()), size};
}

} // namespace hvd_order
