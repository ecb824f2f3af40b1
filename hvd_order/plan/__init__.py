"""How a model's gradients are best cut and sent. Pure: no framework, no clock, no I/O."""
