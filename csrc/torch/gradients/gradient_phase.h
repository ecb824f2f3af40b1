#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hvd_order {

/// Where the gradient of one parameter, and the update that it is for, stand in a step. A step that
/// updates at once goes WAITING, SENT, SUMMED, WAITING; one whose update waits for its reader goes
/// WAITING, SENT, DEFERRED, DUE, SUMMED, WAITING.
enum class GradientPhase : std::uint8_t {
  WAITING,  ///< not sent; what a backward pass has added so far is this rank's own
  SENT,     ///< passed to the engine, or left out of its sums: absent, sparse
  SUMMED,   ///< the sum is what the program finds
  DEFERRED, ///< `step()` has been called; neither sum nor update has been seen
  DUE,      ///< the sum is there, the deferred update has not been applied
};

enum class GradientEvent : std::uint8_t {
  SEND,   ///< passed to the engine; once more when the rank gives up the step
  SUM,    ///< the sum has come
  DEFER,  ///< `step()` leaves the update to the parameter's reader
  UPDATE, ///< the deferred update begins
  BEGIN,  ///< the next step begins
};

inline constexpr std::size_t kGradientPhases = 5;
inline constexpr std::size_t kGradientEvents = 5;

inline constexpr std::array<std::string_view, kGradientPhases> kGradientPhaseNames{
    "WAITING", "SENT", "SUMMED", "DEFERRED", "DUE"};
inline constexpr std::array<std::string_view, kGradientEvents> kGradientEventNames{
    "SEND", "SUM", "DEFER", "UPDATE", "BEGIN"};

/// Returns the phase after an event; nothing: the event cannot happen in that phase, since a
/// gradient would be sent twice, used before its sum, or lose its update.
constexpr std::optional<GradientPhase> nextPhase(GradientPhase phase, GradientEvent event) {
  using Row = std::array<std::optional<GradientPhase>, kGradientEvents>;
  constexpr std::nullopt_t kNever = std::nullopt;
  using enum GradientPhase;
  // SEND, SUM, DEFER, UPDATE, BEGIN
  constexpr std::array<Row, kGradientPhases> kTable{{
      {SENT, kNever, kNever, kNever, WAITING},  // WAITING
      {SENT, SUMMED, DEFERRED, kNever, kNever}, // SENT
      {kNever, kNever, DUE, kNever, WAITING},   // SUMMED
      {kNever, DUE, kNever, kNever, kNever},    // DEFERRED
      {kNever, kNever, kNever, SUMMED, kNever}, // DUE
  }};
  return kTable[static_cast<std::size_t>(phase)][static_cast<std::size_t>(event)];
}

} // namespace hvd_order
