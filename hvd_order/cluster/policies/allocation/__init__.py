"""What several policies share: sizes and speeds of jobs, and placements from ranks or numbers."""
