"""Triton kernels. Each has a plain PyTorch twin elsewhere in the package; ops.py chooses."""
