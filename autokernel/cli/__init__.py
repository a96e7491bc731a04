"""The command lines: arguments, commands of orchestrate.py, and the whole job."""
