#include "engine/activity.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

// A process does one thing at a time that stops it for long, whichever engine asks; so there is one
// text for all engines, set where a wait begins that may be long.

namespace hvd_order {

namespace {

constexpr std::size_t kMaxTextBytes = 320; // with the header, a message of one frame
constexpr std::size_t kWordBytes = sizeof(std::uint32_t);

struct Text {
  std::mutex mutex;
  std::string value;
};

Text& current() {
  static auto* const kText = new Text; // never destroyed: engines may ask until the process ends
  return *kText;
}

} // namespace

void setActivity(std::string text) {
  const std::scoped_lock lock(current().mutex);
  current().value = std::move(text);
}

std::string activity() {
  const std::scoped_lock lock(current().mutex);
  return current().value;
}

void appendText(std::vector<std::uint32_t>& words, const std::string& text) {
  std::size_t size = std::min(text.size(), kMaxTextBytes);
  // The bytes of a character after its first begin with the bits 10.
  while (0 < size && size < text.size() && (static_cast<unsigned char>(text[size]) >> 6) == 2) {
    --size;
  }
  words.push_back(static_cast<std::uint32_t>(size));
  const std::size_t first = words.size();
  words.resize(first + (size + kWordBytes - 1) / kWordBytes, 0);
  std::memcpy(words.data() + first, text.data(), size);
}

std::string textAt(const std::vector<std::uint32_t>& words, std::size_t at) {
  if (at >= words.size()) {
    return {};
  }
  const std::size_t size = std::min<std::size_t>(words[at], (words.size() - at - 1) * kWordBytes);
  return {reinterpret_cast<const char*>(words.data() + at + 1), size};
}

} // namespace hvd_order
