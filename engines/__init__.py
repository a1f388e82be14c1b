"""Engines: what runs a plan. Each is a row of `lagraph.registry.ENGINES`, loaded when needed.

An engine module has an `ENGINE` with `plan(problem, knobs)`, whose result has
`run(ins, outs, workspace)` and `workspace_size(T, N)` in bytes. `ins` and `outs` follow
`problem.inputs` and `problem.outputs`, None where a tensor is absent. Outputs are allocated by the
caller, uninitialized; the engine writes all of them. `final_state` may be the very tensor that
`initial_state` is.
"""
