"""Runs jobs for real under a policy, on hosts or under Slurm. docs/cluster-serve.md says more."""
