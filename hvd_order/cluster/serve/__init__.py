"""Runs jobs for real under a policy, on hosts or under Slurm; see docs/guides/cluster-serve.md."""
