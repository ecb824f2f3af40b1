"""The command line, and what looks at a program, a host or a first run."""
