#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hvd_order {

/// What this process waits in, other than the exchange of gradients; for other ranks whose
/// gradients wait for it meanwhile. Empty if nothing is known. Thread-safe.
void setActivity(std::string text);
[[nodiscard]] std::string activity();

/// A text as words of a control message: its number of bytes, then the bytes. Long ones are cut.
void appendText(std::vector<std::uint32_t>& words, const std::string& text);
/// The text that begins at word `at`; empty if there is none.
[[nodiscard]] std::string textAt(const std::vector<std::uint32_t>& words, std::size_t at);

} // namespace hvd_order
