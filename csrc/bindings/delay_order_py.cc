#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "servers/admission/delay_order.h"

namespace py = pybind11;

namespace hvd_order {

void bindDelayOrder(py::module_& m) {
  m.def(
      "delay_bounded_order",
      [](const std::vector<std::pair<std::int64_t, double>>& updates) {
        std::vector<WaitingUpdate> waiting;
        waiting.reserve(updates.size());
        for (const auto& [slack, seconds] : updates) {
          waiting.push_back({slack, seconds});
        }
        DelayOrder found = delayBoundedOrder(waiting);
        return std::pair(std::move(found.order), std::move(found.late));
      },
      py::arg("updates"));
}

} // namespace hvd_order
