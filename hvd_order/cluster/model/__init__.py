"""Machines, jobs, how fast jobs run, and what their completion is worth."""
