#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/types.h"

// The least that a test program needs: TEST registers a case, CHECK* throw Failure with file, line
// and values, runAll runs every case. A case that hangs ends the program through SIGALRM.
namespace hvd_order::test {

constexpr unsigned kCaseLimitSeconds = 100;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) {
    cases().push_back({name, body});
  }
};

/// Runs the cases whose name contains the first argument; all without one.
inline int runAll(int argc, char** argv) {
  int failures = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) {
      continue;
    }
    std::printf("%s\n", c.name); // before it runs, so that the log shows which one hangs
    std::fflush(stdout);
    ::alarm(kCaseLimitSeconds);
    try {
      c.body();
    } catch (const std::exception& e) {
      ++failures;
      std::printf("  FAILED: %s\n", e.what());
    }
  }
  std::printf(failures == 0 ? "all passed\n" : "%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}

inline std::ostream& operator<<(std::ostream& out, SliceKey slice) {
  return out << slice.model << ':' << slice.index;
}

inline std::ostream& operator<<(std::ostream& out, TensorKey tensor) {
  return out << tensor.model << ':' << tensor.tensor;
}

template <typename T>
void write(std::ostream& out, const T& value) {
  out << value;
}

template <typename T>
void write(std::ostream& out, const std::vector<T>& values) {
  out << '[';
  for (std::size_t i = 0; i < values.size(); ++i) {
    out << (i == 0 ? "" : ", ");
    write(out, values[i]);
  }
  out << ']';
}

template <typename A, typename B>
void checkEqual(const A& actual, const B& expected, const char* text, const char* where) {
  if (!(actual == expected)) {
    std::ostringstream out;
    out << where << ": " << text << " is ";
    write(out, actual);
    out << ", expected ";
    write(out, expected);
    throw Failure(out.str());
  }
}

inline void check(bool condition, const char* text, const char* where) {
  if (!condition) {
    throw Failure(std::string(where) + ": " + text + " does not hold");
  }
}

inline void checkContains(const std::string& text, const std::string& part, const char* where) {
  if (text.find(part) == std::string::npos) {
    throw Failure(std::string(where) + ": \"" + text + "\" lacks \"" + part + "\"");
  }
}

/// @return the message of the error.
template <typename Error, typename Body>
std::string checkThrows(Body body, const char* text, const char* where) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  } catch (const std::exception& e) {
    throw Failure(std::string(where) + ": " + text + " throws another type: " + e.what());
  }
  throw Failure(std::string(where) + ": " + text + " does not throw");
}

/// Runs `body(0) .. body(count - 1)` at the same time; throws the first error after all have ended.
inline void onThreads(int count, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        try {
          body(i);
        } catch (...) {
          errors[static_cast<std::size_t>(i)] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

} // namespace hvd_order::test

// For main.cc, which knows no cases.
extern "C" int runTestProgram(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}

// libstdc++.so counts the owners of an exception with atomics that ThreadSanitizer does not see,
// because that library is not built with it; so the last owner's delete looks like a race.
extern "C" [[gnu::used, gnu::visibility("default")]] const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}

#define HVDO_STRING(x) #x
#define HVDO_STRING_OF(x) HVDO_STRING(x)
#define HVDO_WHERE __FILE__ ":" HVDO_STRING_OF(__LINE__)

#define TEST(name)                                                        \
  static void name();                                                     \
  static const ::hvd_order::test::Register name##Registered(#name, name); \
  static void name()

#define CHECK(...) ::hvd_order::test::check((__VA_ARGS__), #__VA_ARGS__, HVDO_WHERE)
#define CHECK_EQUAL(actual, ...) \
  ::hvd_order::test::checkEqual(actual, __VA_ARGS__, #actual, HVDO_WHERE)
#define CHECK_CONTAINS(text, part) ::hvd_order::test::checkContains(text, part, HVDO_WHERE)
#define CHECK_THROWS(type, ...) \
  ::hvd_order::test::checkThrows<type>([&] { (void)(__VA_ARGS__); }, #__VA_ARGS__, HVDO_WHERE)
