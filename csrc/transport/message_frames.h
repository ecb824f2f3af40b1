#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/control_channel.h"

namespace hvd_order {

// The form of control messages on the wire: frames of one size, which several receives can be
// posted ahead for. Pure.

inline constexpr std::size_t kFrameWords = 128;
/// The last word of a frame, once it is there.
inline constexpr std::uint32_t kArrived = 1;
/// The most words that a message can have.
inline constexpr std::size_t kMostMessageWords = std::size_t{1} << 25;
/// A channel's own message to a neighbour that it parts from.
inline constexpr auto kParting = static_cast<MessageKind>(0xffffffff);

/// The words of a message's frames, one frame after the other.
/// @throws BrokenInvariant if the message has too many words.
std::vector<std::uint32_t> frameWords(const ControlMessage& message);

/// Puts the frames of one sender together.
class Assembly final {
 public:
  /// @return the message that ends with this frame, if one does.
  /// @throws MalformedMessage if `frame` is none, or not what must come next.
  std::optional<ControlMessage> add(Rank from, std::span<const std::uint32_t> frame);

 private:
  ControlMessage message_{};
  std::size_t missing_ = 0; // words of message_ that are still to come
};

/// A text as a control message (TextStar).
ControlMessage wrapText(const std::string& text);
/// @throws MalformedMessage if the message holds no text.
std::string unwrapText(Rank from, const ControlMessage& message);

} // namespace hvd_order
