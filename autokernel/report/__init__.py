"""What a run came to, for people: the terminal while it works, report.md and report.html after it."""
