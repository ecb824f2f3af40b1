#include "bindings/bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Scheduler, order agreement and simulator; needs no framework.";
  hvd_order::bindErrors(m);
  hvd_order::bindScheduler(m);
  hvd_order::bindSimulate(m);
  hvd_order::bindSampled(m);
  hvd_order::bindDelayOrder(m);
  hvd_order::bindUpdateRule(m);
}
