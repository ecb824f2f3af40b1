"""What all benchmarks share: turns, statistics, environment, starting ranks, reports."""
