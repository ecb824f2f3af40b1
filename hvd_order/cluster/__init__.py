"""Scheduling of many training jobs on the machines of a cluster; see docs/guides/cluster.md."""
