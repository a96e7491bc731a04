"""Code for kernel files that cheat: it finds the object that runs the kernel in a process of our gate; None elsewhere."""

FIND_WORKER = """
import sys

def find_worker():
    frame = sys._getframe()
    while frame:
        if type(frame.f_locals.get("self")).__name__ == "Worker":
            return frame.f_locals["self"]
        frame = frame.f_back
"""
