#include "bindings/bindings.h"

PYBIND11_MODULE(_torch, m) {
  m.doc() = "The engine, with the transports of tensors.";
  hvd_order::bindErrors(m);
  hvd_order::bindScheduler(m);
  hvd_order::bindEngine(m);
  hvd_order::bindOpGradientQueue(m);
  hvd_order::bindTransports(m);
  hvd_order::bindGradients(m);
  hvd_order::bindOwners(m);
  hvd_order::bindParameters(m);
  hvd_order::bindValues(m);
  hvd_order::bindUpdateRule(m);
  hvd_order::bindConnections(m);
  hvd_order::bindServer(m);
  hvd_order::bindServerTransport(m);
}
