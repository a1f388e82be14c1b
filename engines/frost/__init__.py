"""The frost engine: hand-scheduled CuTe DSL kernels for NVIDIA SM90, launched through TVM-FFI.

A kernel is described by a `signature.Signature`, compiled once by `compile`, kept on disk by
`cache`, and called by a plan of `launch`. `support` says what is served.
"""
