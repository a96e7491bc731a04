"""What the gate finds of kernels whose speed is known: copies, and slowed-down copies."""
