"""Starting processes, and finding out how this one was started."""
