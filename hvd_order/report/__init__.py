"""Pictures and tables made from what a run left behind."""
