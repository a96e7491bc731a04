"""Problems of KernelBench: what they ask for, and ModelNew made of our kernels."""
