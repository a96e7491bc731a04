"""The loop of experiments: which target next, propose, judge, keep or reset; and what keeps it going."""
