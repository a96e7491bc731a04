"""What every room stands on: checks before the start, records, verdicts, what a terminal shows."""
