"""Device code that the kernels share."""
