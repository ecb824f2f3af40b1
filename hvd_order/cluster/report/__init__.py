"""Tables and pictures of simulated runs."""
