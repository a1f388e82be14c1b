"""The Triton engine: fused kernels for NVIDIA GPUs from SM80 on."""
