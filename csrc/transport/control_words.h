#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "transport/control_channel.h"

namespace hvd_order {

/// Reads a control message of another rank word by word. Nothing in it is believed: what does not
/// fit throws MalformedMessage, which names the sender.
class ControlWords final {
 public:
  /// @param message must outlive this object.
  ControlWords(Rank from, const ControlMessage& message)
      : from_(from), kind_(message.kind), words_(message.words) {}

  /// The next word. @param what for the error.
  std::uint32_t next(const char* what) {
    return take(1, what)[0];
  }
  /// The next two words, the upper half first.
  std::uint64_t next64(const char* what) {
    const std::span<const std::uint32_t> halves = take(2, what);
    return std::uint64_t{halves[0]} << 32 | halves[1];
  }
  /// The next word, a rank of so many.
  Rank nextRank(int size, const char* what) {
    return rank(next(what), size, what);
  }
  /// All words that are left.
  std::span<const std::uint32_t> rest() {
    return take(words_.size(), "");
  }
  /// All words that are left, groups of so many.
  std::span<const std::uint32_t> rest(std::size_t groupOf, const char* what) {
    if (words_.size() % groupOf != 0) {
      refuse(concat(words_.size(), " words are left for ", what, ", ", groupOf, " each"));
    }
    return rest();
  }
  /// Requires that no word is left.
  void end() const {
    if (!words_.empty()) {
      refuse(concat(words_.size(), " words more than it can have"));
    }
  }
  /// @return `word` as a rank of so many.
  [[nodiscard]] Rank rank(std::uint32_t word, int size, const char* what) const {
    if (word >= static_cast<std::uint32_t>(size)) {
      refuse(concat(what, " is ", word, ", of ", size, " ranks"));
    }
    return static_cast<Rank>(word);
  }
  [[noreturn]] void refuse(const std::string& problem) const {
    refuseMessage(from_, concat("kind ", static_cast<std::uint32_t>(kind_)), problem);
  }
  /// Throws MalformedMessage.
  [[noreturn]] static void
  refuseMessage(Rank from, const std::string& which, const std::string& problem) {
    throw MalformedMessage(concat(
        "rank ", from, " sent a malformed control message (", which, "): ", problem,
        ". All ranks must run the same version of hvd_order"));
  }

 private:
  std::span<const std::uint32_t> take(std::size_t count, const char* what) {
    if (words_.size() < count) {
      refuse(concat("it ends before ", what));
    }
    const auto taken = words_.first(count);
    words_ = words_.subspan(count);
    return taken;
  }

  Rank from_;
  MessageKind kind_;
  std::span<const std::uint32_t> words_;
};

} // namespace hvd_order
