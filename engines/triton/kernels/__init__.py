"""The kernels, one job a module."""
