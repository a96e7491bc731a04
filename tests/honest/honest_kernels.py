"""Odd but honest kernels, which the gate must pass: each does something that a cheat also does, and does its own work."""

from honest_memory import MEMORY
from honest_programs import PROGRAMS
from honest_schedules import SCHEDULES
from honest_sources import SOURCES

HONEST = (*SCHEDULES, *MEMORY, *SOURCES, *PROGRAMS)
