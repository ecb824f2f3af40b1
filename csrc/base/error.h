#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace hvd_order {

/// Base class of all exceptions of this library. Python has the same tree
/// (hvd_order/base/errors.py).
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The caller asked for something impossible: a user's mistake.
struct InvalidUsage : Error {
  using Error::Error;
};

/// A collective operation failed; the job cannot continue unless it is formed anew.
struct CollectiveError : Error {
  using Error::Error;
};

/// Another rank died, left or closed its connection.
struct PeerLost : CollectiveError {
  using CollectiveError::CollectiveError;
};

/// A parameter server is gone; the text names it.
struct ServerLost : PeerLost {
  using PeerLost::PeerLost;
};

/// Another rank sent what no rank of this version sends; the text names it.
struct MalformedMessage : CollectiveError {
  using CollectiveError::CollectiveError;
};

/// Nothing moved for longer than the configured time.
struct TransferTimeout : CollectiveError {
  using CollectiveError::CollectiveError;
};

/// This rank's device failed; the engine adds the rank.
struct DeviceFailed : CollectiveError {
  using CollectiveError::CollectiveError;
};

/// A bug in this library.
struct BrokenInvariant : Error {
  using Error::Error;
};

/// Concatenates the arguments, each written with `<<`.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Returns the text of an exception of any class.
inline std::string textOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

/// Whether the exception is a MalformedMessage.
inline bool isMalformed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const MalformedMessage&) {
    return true;
  } catch (...) {
    return false;
  }
}

} // namespace hvd_order

/// Throws BrokenInvariant with the given parts when `condition` does not hold.
#define HVDO_CHECK(condition, ...)                                                                \
  do {                                                                                            \
    if (!(condition)) [[unlikely]] {                                                              \
      throw ::hvd_order::BrokenInvariant(                                                         \
          ::hvd_order::concat("broken invariant (" #condition "): " __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                             \
  } while (false)
