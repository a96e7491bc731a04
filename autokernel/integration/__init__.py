"""Kept kernels in the model: operators, the backend of torch.compile, the proof from end to end."""
