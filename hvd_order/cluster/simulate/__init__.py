"""Virtual time for policies and jobs, and what it measures."""
