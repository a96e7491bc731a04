"""Kernels that leave the repository: a package of their own, a Hugging Face kernel project."""
