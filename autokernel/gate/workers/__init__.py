"""The processes in which kernels run, and the sandbox around them."""
