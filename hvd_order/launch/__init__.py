"""Launcher: starts processes, and determines how this process was started."""
