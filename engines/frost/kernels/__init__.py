"""CuTe DSL kernels. Importing them loads `cutlass`: only a plan does."""
