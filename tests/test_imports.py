"""What importing loads, what may import what, and habits of the source, read with `ast`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lagraph

ROOT = Path(__file__).resolve().parent.parent
CORE, ENGINES, NODES, OPS = (ROOT / name for name in ("lagraph", "engines", "nodes", "ops"))
MODULES = {
    str(path.relative_to(ROOT)): path
    for folder in (CORE, ENGINES, NODES, OPS)
    for path in sorted(folder.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}
modules = pytest.mark.parametrize("name", MODULES)
CORE_FILES = [name for name in MODULES if name.startswith("lagraph/")]
HEAVY = ("triton", "cutlass", "tvm_ffi", "torch._dynamo", "torch._inductor")


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Loading ----------------------------------------------------------------------------------------

STEPS = {
    "import lagraph": "import lagraph",
    "a graph on a CPU": """
import torch, lagraph
graph = lagraph.Graph(device="cpu")
q = torch.randn(4, 1, 4)
g = torch.zeros(4, 1)
o, *_ = graph.gdn(q, q, q, g, g, torch.tensor([0, 4]))
o.set_output(True)
graph.build()
graph.execute({o: torch.empty(4, 1, 4)})
""",
    "an operator on a CPU": """
import torch
from lagraph.ops import gated_delta_net
q = torch.randn(4, 1, 4, requires_grad=True)
g = torch.zeros(4, 1)
gated_delta_net(q, q, q, g, g, torch.tensor([0, 4]))[0].sum().backward()
""",
    "the command line": """
import contextlib, io
from lagraph.__main__ import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["support"])
    main(["describe", "gdn"])
""",
}


@pytest.mark.parametrize("code", STEPS.values(), ids=STEPS)
def test_no_kernel_language_is_loaded(code):
    """Beyond what torch loads by itself."""
    loaded = python(
        f"import sys, json, torch\nbefore = set(sys.modules)\n{code}\n"
        f"new = set(sys.modules) - before\n"
        f"heavy = {HEAVY!r}\n"
        "print(json.dumps(sorted(m for m in new if m.startswith(heavy))))"
    )
    assert [name for name in loaded if not name.startswith("torch.")] == []
    if code == STEPS["import lagraph"]:
        assert loaded == []


def test_operators_are_registered_when_they_are_wanted():
    found = python(
        "import json, sys, lagraph\nbefore = 'lagraph.ops' in sys.modules\n"
        "names = lagraph.ops.__all__\nprint(json.dumps([before, len(names)]))"
    )
    assert found[0] is False
    assert found[1] > 15


def test_importing_is_quick():
    """Milliseconds beyond torch's own import; the aim is 150, the bound is for busy machines."""
    code = (
        "import json, time, torch\nstart = time.perf_counter()\nimport lagraph\n"
        "print(json.dumps(1e3 * (time.perf_counter() - start)))"
    )
    took = min(python(code) for _ in range(3))
    print(f"import lagraph: {took:.0f} ms beyond torch")
    assert took < 400


# Names ------------------------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_there():
    assert lagraph.__all__ == sorted(lagraph.__all__)
    for name in lagraph.__all__:
        assert getattr(lagraph, name) is not None, name
    public = {
        name for name, value in vars(lagraph).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("lagraph.")
        and name != "annotations"
    }  # fmt: skip
    assert public <= set(lagraph.__all__)


def test_every_error_is_public_and_says_what_it_is():
    for name in lagraph.errors.__all__:
        kind = getattr(lagraph.errors, name)
        assert getattr(lagraph, name) is kind
        assert issubclass(kind, lagraph.LagraphError)
        assert kind.__doc__
    with pytest.raises(AttributeError, match="module 'lagraph' has no attribute 'nope'"):
        lagraph.nope  # noqa: B018


def test_operators_are_sorted_and_there():
    from lagraph import ops

    assert ops.__all__ == sorted(ops.__all__)
    assert all(callable(getattr(ops, name)) for name in ops.__all__)


def names_in(tree):
    """The module's `__all__`, or None."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return node.value
    return None


@modules
def test_every_module_has_a_docstring_and_lists_its_names(name):
    tree = TREES[name]
    assert ast.get_docstring(tree), f"{name}: no docstring"
    listed = names_in(tree)
    if name.endswith("__init__.py") and len(tree.body) == 1:
        return  # an empty package
    assert listed is not None, f"{name}: no __all__"
    if not isinstance(listed, ast.List):
        return  # computed
    names = ast.literal_eval(listed)
    assert len(set(names)) == len(names)
    defined = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
    assert set(names) <= defined, f"{name}: {set(names) - defined} are not defined"


# Who imports whom --------------------------------------------------------------------------------


def imports(tree, package):
    """Full names of all modules that a tree imports, wherever; relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            yield base
            if base in ("lagraph", package):
                yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(name):
    """The package that a file's relative imports start from."""
    parts = Path(name).parent.parts
    return ".".join(parts if parts[0] == "lagraph" else ("lagraph", *parts))


PARTS = ("lagraph.nodes", "lagraph.ops", "lagraph.engines")
MAY = {"lagraph": (), "nodes": ("lagraph.nodes",), "engines": ("lagraph.engines",),
       "ops": ("lagraph.ops", "lagraph.nodes")}  # fmt: skip


@modules
def test_imports_flow_one_way(name):
    """nodes and engines import the core; ops the core and nodes; the core none of them."""
    folder = Path(name).parts[0]
    if folder == "lagraph" and Path(name).name in ("__init__.py", "__main__.py"):
        allowed = ("lagraph.ops",) if name.endswith("__init__.py") else ()
    else:
        allowed = MAY[folder]
    for found in imports(TREES[name], package_of(name)):
        for part in PARTS:
            if found == part or found.startswith(part + "."):
                assert part in allowed, f"{name} imports {found}"


@modules
def test_no_bare_import_of_a_folder(name):
    """`import engines` works from the checkout and would load a second copy."""
    for found in imports(TREES[name], package_of(name)):
        assert found.split(".")[0] not in ("engines", "nodes", "ops"), f"{name} imports {found}"


@modules
def test_kernel_languages_are_imported_by_their_engine_alone(name):
    owner = {"triton": "engines/triton/", "cutlass": "engines/frost/", "tvm_ffi": "engines/frost/"}
    for found in imports(TREES[name], package_of(name)):
        home = owner.get(found.split(".")[0])
        assert home is None or name.startswith(home), f"{name} imports {found}"


# Habits -----------------------------------------------------------------------------------------


def in_kernels(name):
    return "/kernels/" in name


@modules
def test_no_assert_and_no_item(name):
    """Errors are raised on purpose, and nothing synchronizes in passing."""
    if in_kernels(name):
        return
    for node in ast.walk(TREES[name]):
        assert not isinstance(node, ast.Assert), f"{name}:{node.lineno}: assert"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "item", f"{name}:{node.lineno}: .item()"


@modules
def test_no_public_function_takes_any_keyword(name):
    """A misspelt option must be an error."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            private = node.name.startswith("_")
            assert private or node.args.kwarg is None, f"{name}:{node.lineno}: **{node.name}"


@modules
def test_public_names_have_docstrings(name):
    """What a module lists; of the core's public classes, their public methods, too.

    A kernel is described by its module.
    """
    listed = names_in(TREES[name])
    names = ast.literal_eval(listed) if isinstance(listed, ast.List) else []
    names = [] if in_kernels(name) else names
    for node in TREES[name].body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name not in names:
            continue
        assert ast.get_docstring(node), f"{name}:{node.lineno}: {node.name}"
        for method in node.body if isinstance(node, ast.ClassDef) and name in CORE_FILES else ():
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                assert ast.get_docstring(method), f"{name}:{method.lineno}: {method.name}"


@modules
def test_the_environment_is_read_at_import_only(name):
    tree = TREES[name]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute):
                    assert inner.attr not in ("environ", "getenv"), f"{name}:{inner.lineno}"
