"""Order and slices for a model's gradients. Pure: no framework, no clock, no I/O."""
