#pragma once

#if defined(__linux__)
#include <pthread.h>
#endif

namespace hvd_order {

/// Names the calling thread for debuggers and for `/proc`, which keep at most 15 characters.
inline void nameThisThread(const char* name) noexcept {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#else
  static_cast<void>(name);
#endif
}

} // namespace hvd_order
