"""Prediction of step times. Pure: no framework, no clock, no I/O."""
