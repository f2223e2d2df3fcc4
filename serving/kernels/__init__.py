"""Triton kernels of serving's own."""
