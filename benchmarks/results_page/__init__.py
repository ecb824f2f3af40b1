"""Makes the page of results, its pictures and the README's table from the result files."""
