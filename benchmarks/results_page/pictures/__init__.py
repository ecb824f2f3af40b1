"""Pictures of the page, one a file."""
