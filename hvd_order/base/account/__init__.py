"""Where the time of a step goes, on all ranks: pure arithmetic, without threads or a framework."""
