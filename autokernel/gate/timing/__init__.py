"""Paired timing: contests, pairs of processes, batches of calls, statistics."""
