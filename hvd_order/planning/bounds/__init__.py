"""Lower bounds on the step time."""
