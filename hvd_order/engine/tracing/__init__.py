"""The parts of a timeline: what a rank records, how parts come to rank 0, and their merger."""
