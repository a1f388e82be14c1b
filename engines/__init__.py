"""Engines: what runs a plan. Each is a row of `lagraph.registry.ENGINES`, loaded when needed.

An engine module has an `ENGINE` with `plan(problem, knobs)`, whose result has
`run(ins, outs, workspace)` and `workspace_size(T, N)` in bytes. `ins` and `outs` follow
`problem.inputs` and `problem.outputs`, None where a tensor is absent. Outputs are allocated by the
caller, uninitialized; the engine writes all of them. `final_state` may be the very tensor that
`initial_state` is. An `ENGINE` may also have `jobs(problem, knobs)`: what another process can
compile for that plan, as `lagraph.warmup.Job`s; none where nothing is left to compile.
"""
