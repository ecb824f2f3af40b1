#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "replay.h"
#include "search.h"
#include "setups.h"
#include "trace.h"

// The program: model_checker [--large] [--only NAME] [--states N] [--counterexample]
//          or: model_checker --replay FILE...
//
// Prints one line a setup, with processor time. Ends with 1 and a trace if a property is broken.

namespace hvd_order::checker {

namespace {

constexpr std::uint64_t kAuditedStates = 30'000;     // the audit costs ten times the search
constexpr std::uint64_t kShortestStates = 1'000'000; // breadth first needs memory for a layer

struct Arguments {
  bool large = false;
  bool counterexample = false; // one is expected, as of a mutant
  std::string only;            // part of a setup's name
  std::uint64_t states = SearchOptions{}.mostStates;
  std::vector<std::string> recordings;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&] {
      if (++i == argc) {
        throw InvalidUsage(option + " needs a value");
      }
      return std::string(argv[i]);
    };
    if (option == "--large") {
      arguments.large = true;
    } else if (option == "--counterexample") {
      arguments.counterexample = true;
    } else if (option == "--only") {
      arguments.only = value();
    } else if (option == "--replay") {
      arguments.recordings.assign(argv + i + 1, argv + argc);
      break;
    } else if (option == "--states") {
      arguments.states = std::stoull(value());
    } else {
      throw InvalidUsage("unknown option " + option);
    }
  }
  return arguments;
}

/// Explores small setups without reduction as well: it must find the same ends, and equal states
/// must have equal futures.
void audit(const Setup& setup, SearchResult& result) {
  const SearchResult whole = search(setup, {.reduced = false, .audit = true});
  if (whole.violation) {
    result.violation = whole.violation;
    result.trace = whole.trace;
  } else if (whole.ends != result.ends) {
    result.violation = {"reduction", concat(whole.ends, " ends, but ", result.ends, " if reduced")};
  }
}

SearchResult check(const Setup& setup, std::uint64_t states) {
  const std::clock_t start = std::clock();
  SearchResult result = search(setup, {.mostStates = states});
  if (!result.violation && result.complete && result.states <= kAuditedStates) {
    audit(setup, result);
  }
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  std::printf(
      "%-48s %10llu states %10llu events %5llu ends %6.2f s%s\n", setup.name.c_str(),
      static_cast<unsigned long long>(result.states),
      static_cast<unsigned long long>(result.events), static_cast<unsigned long long>(result.ends),
      seconds, result.complete ? "" : "  stopped");
  std::fflush(stdout);
  return result;
}

/// Prints the shortest counterexample that can be found in reasonable time.
void show(const Setup& setup, SearchResult result) {
  const SearchResult shortest = searchShortest(setup, kShortestStates);
  if (shortest.violation) {
    result = shortest;
  }
  std::printf(
      "\n%s breaks '%s' after %zu events (%llu states):\n%s\n", setup.name.c_str(),
      result.violation->property.c_str(), result.trace.size(),
      static_cast<unsigned long long>(result.states),
      textOf(setup, result.trace, *result.violation).c_str());
}

int replayAll(const std::vector<std::string>& files) {
  int failed = 0;
  for (const std::string& file : files) {
    const Recording recording = readRecording(file);
    const Replayed replayed = replay(recording);
    std::printf(
        "%s: %zu of %zu marks, %zu messages, %zu of them empty, %llu events tried\n",
        std::filesystem::path(file).stem().c_str(), replayed.reached, recording.marks.size(),
        replayed.messages, replayed.questions, static_cast<unsigned long long>(replayed.tried));
    if (replayed.violation) {
      std::printf(
          "  breaks '%s': %s\n", replayed.violation->property.c_str(),
          replayed.violation->detail.c_str());
    } else if (!replayed.same) {
      const Recording::Mark& mark = recording.marks.at(replayed.reached);
      std::printf(
          "  the classes cannot do what was recorded: no further than %d%c%u\n", mark.rank,
          mark.kind, mark.slice);
    }
    failed += replayed.same ? 0 : 1;
  }
  return failed == 0 ? 0 : 1;
}

int run(const Arguments& arguments) {
  if (!arguments.recordings.empty()) {
    return replayAll(arguments.recordings);
  }
  std::uint64_t states = 0;
  std::uint64_t questions = 0;
  for (const Setup& setup : arguments.large ? largeSetups() : quickSetups()) {
    if (setup.name.find(arguments.only) == std::string::npos) {
      continue;
    }
    const SearchResult result = check(setup, arguments.states);
    if (result.violation) {
      show(setup, result);
      return arguments.counterexample ? 0 : 1;
    }
    states += result.states;
    questions += result.questions;
  }
  std::printf("%llu states: every property holds\n", static_cast<unsigned long long>(states));
  if (arguments.only.empty() && questions == 0) {
    std::printf("but no rank ever asked to be heard\n");
    return 1;
  }
  return arguments.counterexample ? 1 : 0;
}

} // namespace

} // namespace hvd_order::checker

int main(int argc, char** argv) {
  try {
    return hvd_order::checker::run(hvd_order::checker::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model_checker: %s\n", error.what());
    return 2;
  }
}
