"""Doors for code that was written for other libraries; nothing here is loaded by `import lagraph`.

`fla` has functions with FLA's names, arguments and layout; `transformers` puts our functions in the
place of those that layers of the transformers package call. Both are clients of `lagraph.ops`.
"""
