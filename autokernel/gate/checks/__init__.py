"""The five stages of correctness."""
