#include "engine/failure_message.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hvd_order {

namespace {

enum class FailureClass : std::uint32_t { kOther, kPeerLost, kTimeout };

constexpr std::size_t kMaxTextBytes = 440;
constexpr std::size_t kWordBytes = sizeof(std::uint32_t);
constexpr std::size_t kHeaderWords = 2; // class and number of bytes

FailureClass classOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost&) {
    return FailureClass::kPeerLost;
  } catch (const TransferTimeout&) {
    return FailureClass::kTimeout;
  } catch (...) {
    return FailureClass::kOther;
  }
}

std::size_t wholeCharacters(const std::string& text) {
  std::size_t size = std::min(text.size(), kMaxTextBytes);
  // The bytes of a character after its first begin with the bits 10.
  while (0 < size && size < text.size() && (static_cast<unsigned char>(text[size]) >> 6) == 2) {
    --size;
  }
  return size;
}

} // namespace

std::exception_ptr withRank(const std::exception_ptr& error, Rank rank) {
  try {
    std::rethrow_exception(error);
  } catch (const DeviceFailed& failed) {
    return std::make_exception_ptr(
        CollectiveError(concat("the device of rank ", rank, " failed: ", failed.what())));
  } catch (...) {
    return error;
  }
}

std::vector<std::uint32_t> packFailure(const std::exception_ptr& error) {
  const std::string text = textOf(error);
  const std::size_t size = wholeCharacters(text);
  std::vector<std::uint32_t> words(kHeaderWords + (size + kWordBytes - 1) / kWordBytes, 0);
  words[0] = static_cast<std::uint32_t>(classOf(error));
  words[1] = static_cast<std::uint32_t>(size);
  std::memcpy(words.data() + kHeaderWords, text.data(), size);
  return words;
}

std::exception_ptr unpackFailure(const std::vector<std::uint32_t>& words) {
  if (words.size() < kHeaderWords) {
    return std::make_exception_ptr(CollectiveError("another rank has failed"));
  }
  const std::size_t size =
      std::min<std::size_t>(words[1], (words.size() - kHeaderWords) * kWordBytes);
  const std::string text(reinterpret_cast<const char*>(words.data() + kHeaderWords), size);
  switch (static_cast<FailureClass>(words[0])) {
    case FailureClass::kPeerLost:
      return std::make_exception_ptr(PeerLost(text));
    case FailureClass::kTimeout:
      return std::make_exception_ptr(TransferTimeout(text));
    default:
      return std::make_exception_ptr(CollectiveError(text));
  }
}

} // namespace hvd_order
