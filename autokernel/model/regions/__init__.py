"""Regions: parts of a model's graph that no named kernel type covers, each made a kernel type of its own at run time."""
