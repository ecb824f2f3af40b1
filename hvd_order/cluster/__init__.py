"""Scheduling of many training jobs on the machines of a cluster. docs/cluster.md says more."""
