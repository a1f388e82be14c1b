"""Eager engine: PyTorch on any device."""
