"""The arithmetic of a decoder: layers, attention, the head; plain or with kernels."""
