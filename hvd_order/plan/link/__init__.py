"""A model of the link, and the slices that suit it."""
