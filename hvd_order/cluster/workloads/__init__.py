"""Jobs over time: public traces, and random ones."""
