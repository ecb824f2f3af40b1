#pragma once

#include <pybind11/pybind11.h>

namespace hvd_order {

/// One function per topic; the module files call them.
void bindErrors(pybind11::module_& m);
void bindScheduler(pybind11::module_& m);
void bindSimulate(pybind11::module_& m);
void bindSampled(pybind11::module_& m);
void bindEngine(pybind11::module_& m);
void bindOpGradientQueue(pybind11::module_& m);
void bindDelayOrder(pybind11::module_& m);
void bindUpdateRule(pybind11::module_& m);
void bindTransports(pybind11::module_& m);
void bindGradients(pybind11::module_& m);
void bindOwners(pybind11::module_& m);
void bindParameters(pybind11::module_& m);
void bindValues(pybind11::module_& m);
void bindConnections(pybind11::module_& m);
void bindServer(pybind11::module_& m);
void bindServerTransport(pybind11::module_& m);

} // namespace hvd_order
