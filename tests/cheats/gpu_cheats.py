"""Kernel files for a GPU that fool a naive gate, each with the reason for which ours must refuse it."""

import gpu_results
import gpu_taking_over
import gpu_timing

CHEATS = (*gpu_timing.CHEATS, *gpu_taking_over.CHEATS, *gpu_results.CHEATS)
