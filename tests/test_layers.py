"""Packages import from the layers above their own, and the arithmetic ones start no JAX.

The layers are those of ARCHITECTURE.md: a package imports only from lines above its own, and the
files inside a package import each other in no circle.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

import scalejax

ROOT = Path(scalejax.__file__).parent

LAYERS = (
    {"core"},
    {"hardware", "config"},
    {"launch", "simulator", "data"},
    {"models"},
    {"training"},
    {"xla"},
    {"planning", "emulation"},
    {"sweep"},
    {"measure"},
    {"api"},
    {"validation"},
    {"report"},
    {"__init__"},
    {"cli"},
    {"__main__"},
)
"""A package imports from earlier sets only."""
NEVER_JAX = (
    "core",
    "hardware",
    "config",
    "launch",
    "simulator",
    "planning",
    "validation",
    "report",
)
"""Packages that start without JAX; `planning` has it compile in other processes."""


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax tree of each module by dotted name, `scalejax` left out."""
    names = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names[name.removesuffix(".__init__")] = path
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in names.items()}


@cache
def nodes(tree: ast.Module) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Imports and calls anywhere in a tree."""
    return tuple(
        node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
    )


def imports_of(tree: ast.Module, known: Mapping[str, ast.Module]) -> set[str]:
    """Modules of scalejax that a tree imports anywhere, functions included."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scalejax":
            package = (node.module or "").removeprefix("scalejax").removeprefix(".")
            for alias in node.names:
                module = f"{package}.{alias.name}".removeprefix(".")
                found.add(module if module in known else package or "__init__")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, _, module = alias.name.partition(".")
                if first == "scalejax":
                    found.add(module or "__init__")
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this check sees them"
    return found


def package_of(module: str) -> str:
    """The first part of a module's name."""
    return module.split(".")[0]


def layer_of(module: str) -> int:
    """The line of LAYERS that holds a module's package."""
    return next(line for line, packages in enumerate(LAYERS) if package_of(module) in packages)


def wrong_imports(trees: Mapping[str, ast.Module]) -> set[str]:
    """Every import from a package of its own line or below, as "importer -> imported"."""
    return {
        f"{module} -> {imported}"
        for module, tree in trees.items()
        for imported in imports_of(tree, trees)
        if package_of(imported) != package_of(module) and layer_of(imported) >= layer_of(module)
    }


def circle(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules of one package that import each other in a circle; empty if there are none."""
    for package in {package_of(module) for module in trees}:
        inside = {name: tree for name, tree in trees.items() if package_of(name) == package}
        graph = {name: imports_of(tree, inside) & set(inside) for name, tree in inside.items()}
        # A package's own file offers what the files beside it define.
        graph = {name: {x for x in found if x != name} for name, found in graph.items()}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return error.args[1]
    return []


def starts_jax(names: str) -> bool:
    """Whether importing `names` alone, in a fresh process, imports JAX."""
    code = f"import sys, {names}; sys.exit(42 if 'jax' in sys.modules else 0)"
    code_of_exit = subprocess.run([sys.executable, "-c", code]).returncode
    assert code_of_exit in (0, 42)
    return code_of_exit == 42


def test_every_package_has_its_layer():
    """The root of the package holds folders, few enough to take in at a glance."""
    packages = {package_of(module) for module in modules()}

    assert packages == set.union(*LAYERS)
    assert len(packages | {"py.typed"}) <= 22


def test_packages_import_from_the_layers_above_their_own():
    """None imports from its own line or below."""
    assert wrong_imports(modules()) == set()


def test_check_of_layers_can_fail():
    """An import from below is found, at the top of a file or within a function."""
    trees = {
        "core.units": ast.parse("from scalejax.simulator.predict import predict"),
        "simulator.predict": ast.parse("from scalejax.core import units"),
        "hardware.chip": ast.parse("def f():\n    import scalejax.config.run"),
        "config.run": ast.parse("from scalejax.config import model"),
        "core.cache": ast.parse("import scalejax"),
    }

    assert wrong_imports(trees) == {
        "core.cache -> __init__",
        "core.units -> simulator.predict",
        "hardware.chip -> config.run",
    }


def test_files_of_a_package_import_each_other_in_no_circle():
    """Each can be read after those that it imports."""
    assert circle(modules()) == []


def test_check_of_circles_can_fail():
    """A circle is found, also of imports within functions."""
    trees = {
        "core.a": ast.parse("from scalejax.core import b"),
        "core.b": ast.parse("def f():\n    from scalejax.core.a import g"),
    }

    assert {"core.a", "core.b"} == set(circle(trees))


def test_arithmetic_packages_start_no_jax():
    """All of their files, imported together in one fresh process."""
    names = [f"scalejax.{name}" for name in modules() if package_of(name) in NEVER_JAX]

    assert not starts_jax(", ".join(names))


def test_command_line_starts_no_jax():
    """Which reads once, when it is imported, whether to look for an accelerator; a command says so
    before. And a command that needs none answers at once."""
    assert not starts_jax("scalejax.cli.main")


def test_check_for_jax_can_fail():
    """A module of another package is told apart."""
    assert starts_jax("scalejax.training.mesh")


def jit_calls(tree: ast.Module) -> list[str]:
    """First arguments of the calls of `jax.jit`, as source."""
    return [
        ast.unparse(node.args[0]) if node.args else ""
        for node in nodes(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("jax.jit", "jit", "nnx.jit")
    ]


def test_training_step_is_jitted_once():
    """What is costed is what is trained: there is one `jax.jit` of the update."""
    calls = {module: jit_calls(tree) for module, tree in modules().items()}
    updates = [(m, call) for m, found in calls.items() for call in found if "_update" in call]

    assert updates == [("training.step", "partial(_update, setup, mesh)")]


def test_step_and_evaluation_are_the_only_modules_that_jit_a_run():
    """Other modules call what these built; the tools that jit say why here."""
    jitting = {module for module, tree in modules().items() if jit_calls(tree)}
    others = jitting - {"training.step", "training.evaluation"}

    # they time small programs of their own: products, copies, all-reduces
    others -= {f"measure.devices.{name}" for name in ("timing", "probes")}
    others -= {"training.multihost"}  # it sums up the bits of a state, and changes none
    others -= {"training.sharpness"}  # it takes products of a Hessian, and updates nothing
    others -= {"xla.functions"}  # it jits a function of the user's, to be compiled
    # it has the gradient and the optimizer that the step is made of, in another order
    others -= {"emulation.executor"}
    assert others <= {"sweep.vmapped"}  # it maps what they built over several runs


@pytest.mark.parametrize("source", ["jax.jit(partial(_update, r))", "nnx.jit(f)"])
def test_check_for_jit_can_fail(source: str):
    """The calls are recognised."""
    assert jit_calls(ast.parse(source))


def test_what_every_module_imports_is_installed_with_scalejax():
    """Of other projects, at the top of a file: what only an extra brings is imported where it is
    used. The tests' own environment has those of all extras, and would notice nothing."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=,; ]", each)[0].lower() for each in project["dependencies"]}
    declared |= {  # pydantic_core comes with pydantic
        re.split(r"[\[<>=,; ]", each)[0].lower().replace("-", "_")
        for name in declared
        for each in requires(name) or ()
        if "extra ==" not in each
    }
    brought_by = packages_distributions()
    missing = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {each.partition(".")[0] for each in names}:
                found = {each.lower() for each in brought_by.get(name, [])}
                found |= {each.replace("-", "_") for each in found}
                if found and name != "scalejax" and not found & declared:
                    missing.add((path.relative_to(ROOT).as_posix(), name))
    assert not missing
