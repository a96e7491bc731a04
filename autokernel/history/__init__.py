"""The memory of a run: results.tsv and git."""
