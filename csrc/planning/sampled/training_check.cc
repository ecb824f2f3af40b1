#include "planning/sampled/training_check.h"

#include <cmath>

#include "base/error.h"
#include "servers/admission/routes.h"

namespace hvd_order::simulate {

namespace {

void checkDelayBound(const SampledStep& step, const SampledTraining& training) {
  if (!training.delayBound) {
    if (training.aggregates) {
      throw InvalidUsage("aggregation without a delay bound; give one");
    }
    return;
  }
  if (training.mode != ServerMode::kAsync || training.pullStart != PullStart::kAnswer) {
    throw InvalidUsage(
        "a delay bound is for asynchronous workers whose servers answer each push; others have "
        "none");
  }
  if (training.servers >= Routes::kDirect) {
    throw InvalidUsage(concat("a delay bound with ", training.servers, " servers; expected fewer"));
  }
  for (TensorId tensor = 0; tensor < step.tensorBytes().size(); ++tensor) {
    if (step.pushOf(tensor) != SampledStep::kNone && step.pullOf(tensor) == SampledStep::kNone) {
      throw InvalidUsage(concat(
          "tensor ", tensor,
          " is pushed and never pulled, so its delay has no limit; a delay bound "
          "needs a pull of each pushed tensor"));
    }
  }
}

} // namespace

void checkTraining(const SampledStep& step, const SampledTraining& training) {
  const auto positive = [](double value) { return std::isfinite(value) && value > 0; };
  const auto notNegative = [](double value) { return std::isfinite(value) && value >= 0; };
  if (training.slowness.empty()) {
    throw InvalidUsage("a training without workers");
  }
  for (const double slowness : training.slowness) {
    if (!positive(slowness)) {
      throw InvalidUsage(concat("a worker with slowness ", slowness, "; expected more than 0"));
    }
  }
  const auto& starts = training.startsS;
  if (!starts.empty() && starts.size() != training.slowness.size()) {
    throw InvalidUsage(concat(starts.size(), " starts of ", training.slowness.size(), " workers"));
  }
  for (const double startS : starts) {
    if (!notNegative(startS)) {
      throw InvalidUsage(concat("a worker begins at ", startS, " s; expected 0 or more"));
    }
  }
  if (training.servers < 1) {
    throw InvalidUsage("0 parameter servers; at least 1 is needed");
  }
  checkDelayBound(step, training);
  for (const double rate : {training.workerBytesPerS, training.serverBytesPerS}) {
    if (!positive(rate)) {
      throw InvalidUsage(concat("a link of ", rate, " bytes/s; a positive rate is needed"));
    }
  }
  for (const Transmission* way : {&training.pull, &training.push}) {
    if (way->turns == Turns::kWindow &&
        !(positive(way->windowBytes) && positive(way->coldWindowBytes))) {
      throw InvalidUsage(concat("a window of ", way->windowBytes, " bytes; expected more than 0"));
    }
    for (const double seconds :
         {way->latencyS, way->sendSecondsPerByte, way->sendSeconds, way->receiveSecondsPerByte,
          way->receiveSeconds, way->coldS}) {
      if (!notNegative(seconds)) {
        throw InvalidUsage(concat("a transmission with a time of ", seconds, " s"));
      }
    }
  }
  for (const double seconds :
       {training.updateSecondsPerByte, training.updateSeconds, training.spreadS}) {
    if (!notNegative(seconds)) {
      throw InvalidUsage(concat("a time of ", seconds, " s; expected 0 or more"));
    }
  }
  if (training.steps < 1 || training.updateLanes < 1) {
    throw InvalidUsage("0 steps, or a server without a lane for updates");
  }
  const auto& servers = training.serverOf;
  if (!servers.empty() && servers.size() != step.tensorBytes().size()) {
    throw InvalidUsage(
        concat(servers.size(), " servers of ", step.tensorBytes().size(), " tensors"));
  }
  for (const std::uint32_t server : servers) {
    if (server >= training.servers) {
      throw InvalidUsage(concat("a tensor on server ", server, " of ", training.servers));
    }
  }
}

} // namespace hvd_order::simulate
