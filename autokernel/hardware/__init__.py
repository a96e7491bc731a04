"""Devices: peaks, caches, and what the driver says of them."""
