"""Imports point one way, and the arithmetic column needs no JAX (conventions, rule 4).

The table is that of the design: a module imports only from rows above its own; a family may
import within itself.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scalejax

ROOT = Path(scalejax.__file__).parent

ARITHMETIC = {
    "errors": -3,
    "allocator": -3,
    "this_process": -3,
    "locations": -2,
    "dataset_facts": 0,
    "formats": 1,
    "units": 0,
    "documents": 0,
    "jax_platform": 1,
    "hardware": 1,
    "layout": 1,
    "metrics": 1,
    "program": 2,
    "collectives": 2,
    "heartbeat": 0,
    "rendezvous": 1,
    "time_ledger": 1,
    "run_clock": 2,
    "record": 2,
    "noise_scale": 2,
    "loss_gap": 3,
    "model_config": 2,
    "parquet_config": -1,
    "augmentation_config": 0,
    "input_config": 1,
    "parquet_files": -1,
    "parquet_filters": 0,
    "petastorm_order": 0,
    "parquet_columns": 1,
    "data_config": 2,
    "training_config": 2,
    "all_reduce_spec": 0,
    "emulation_modes": 1,
    "emulation_algorithms": 1,
    "emulation_config": 2,
    "emulation_record": 3,
    "optimizer_config": 2,
    "schedule_config": 2,
    "scaling": 3,
    "batch_ramp": 3,
    "step_counts": 4,
    "presets": 3,
    "run_checks": 3,
    "exchange_config": 2,
    "exchange_checks": 4,
    "exchange_shares": 6,
    "run_notes": 6,
    "convergence": 3,
    "cost": 3,
    "input_images": 0,
    "input_work": 6,
    "predict": 4,
    "transformer_program": 4,
    "trace_export": 4,
    "config": 5,
    "profile": 10,
    "reference": 9,
    "data_files": 7,
    "run_folder": 9,
    "shortage": 9,
    "input_wait": 3,
    "early_stopping": 10,
    "divergence": 10,
    "measuring": 10,
    "progress": 9,
    "explain": 5,
    "search": 5,
    "plan": 5,
    "ramp_prediction": 5,
    "plan_words": 6,
    "plan_notes": 6,
    "compilation": 11,
    "explained_run": 12,
    "scaling_study": 12,
    "ramp_study": 14,
    "searched_run": 12,
    "widened_programs": 12,
    "planned_run": 14,
    "trace_import": 1,
    "doctor": 12,
    "doctor_tables": 13,
    "chip_kind": 3,
    "recorded_trace": 4,
    "fit_runs": 5,
    "validation": 11,
    "plots": 12,
    "report": 18,
    "tables": 12,
    "waiting": 12,
    "conversion": 4,
    "inspection_classes": 5,
    "inspection_run": 5,
    "inspection": 6,
    "inspection_tables": 14,
    "explanation_tables": 14,
    "run_tables": 14,
    "scaling_tables": 14,
    "input_tables": 14,
    "ramp_tables": 15,
    "search_tables": 14,
    "plan_plots": 14,
    "plan_tables": 14,
    "launch": 2,
    "sweep": 15,
    "emulation_tables": 14,
    "sweep_plots": 16,
    "sweep_tables": 16,
    "bench": 16,
    "bench_plots": 17,
    "bench_tables": 17,
    "quickstart": 19,
    "commands": 20,
    "cli": 21,
    "__main__": 22,
}
"""Row of each module that imports no JAX when it is imported."""
PROGRAMS = {
    "processes": 1,
    "stop_signals": 2,
    "mesh": 3,
    "reference_schedules": 3,
    "schedules": 4,
    "models": 3,
    "data": 3,
    "trust_ratio": 4,
    "loss_scale": 4,
    "optimizers": 5,
    "fine_tuning": 5,
    "exchange": 5,
    "torch_file": 3,
    "pretrained": 5,
    "recipe": 6,
    "averaging": 6,
    "train_state": 7,
    "gradients": 7,
    "batch_shapes": 8,
    "mesh_gradients": 8,
    "local_sgd": 8,
    "step": 9,
    "agreement": 10,
    "evaluation": 10,
    "checkpoint": 10,
    "calibrate": 9,
    "local_cluster": 10,
    "checksums": 3,
    "input_taker": 4,
    "input_probes": 5,
    "input_bench": 7,
    "step_traces": 10,
    "journal": 10,
    "features": 11,
    "input_tuning": 10,
    "run_evaluation": 12,
    "skipped_examples": 11,
    "run_programs": 11,
    "course": 12,
    "training_loop": 13,
    "run_lock": 9,
    "train": 14,
    "emulate": 13,
}
"""Row of each module that does."""
ROWS = {**ARITHMETIC, **PROGRAMS}
WORKER = (
    "bench.timed_steps",
    "profile.model_flop",
    "profile.worker",
    "sweep.mapped",
    "sweep.together",
    "sweep.together_loop",
)
"""What runs in the worker's own process alone, where JAX is."""


def family_of(module: str) -> str:
    """The first part of a module's name; the `report_` files are parts of the report."""
    first = module.split(".")[0]
    return "report" if first.startswith("report_") else first


def modules() -> dict[str, ast.Module]:
    """Syntax tree of each module by dotted name, `scalejax` left out."""
    paths = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for path, name in names.items()}


def imports_of(tree: ast.Module) -> set[str]:
    """Modules of scalejax that a tree imports anywhere, functions included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "scalejax":
            found |= {alias.name for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scalejax."):
            found.add((node.module or "").removeprefix("scalejax."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("scalejax.")]
            found |= {name.removeprefix("scalejax.") for name in names}
    return found


def wrong_imports(trees: dict[str, ast.Module]) -> list[str]:
    """Every import that does not point upwards, as "importer -> imported"."""
    return [
        f"{module} -> {imported}"
        for module, tree in trees.items()
        for imported in sorted(imports_of(tree))
        if family_of(imported) != family_of(module)
        and not ROWS[family_of(imported)] < ROWS[family_of(module)]
    ]


def starts_jax(module: str) -> bool:
    """Whether importing `module` alone, in a fresh process, imports JAX."""
    code = f"import sys, {module}; sys.exit(42 if 'jax' in sys.modules else 0)"
    code_of_exit = subprocess.run([sys.executable, "-c", code]).returncode
    assert code_of_exit in (0, 42)
    return code_of_exit == 42


def test_every_module_has_its_row():
    """A new module is placed in the table before it is imported from anywhere."""
    families = {family_of(module) for module in modules()}

    assert families == set(ROWS)


def test_imports_point_one_way():
    """No module imports from its own row or below."""
    assert wrong_imports(modules()) == []


def test_check_of_direction_can_fail():
    """An upward arrow is found, at the top of a file or within a function."""
    trees = {
        "units": ast.parse("from scalejax.predict import predict"),
        "metrics": ast.parse("def f():\n    import scalejax.layout"),
        "cost.memory": ast.parse("from scalejax.cost.compute import x"),
    }

    assert wrong_imports(trees) == ["units -> predict", "metrics -> layout"]


def test_arithmetic_column_starts_no_jax():
    """All of it, imported together in one fresh process."""
    names = [
        f"scalejax.{module.removesuffix('.__init__')}"
        for module in modules()
        if family_of(module) in ARITHMETIC and module not in ("__main__", *WORKER)
    ]

    assert not starts_jax(", ".join(names))


def test_check_for_jax_can_fail():
    """A module of the other column is told apart."""
    assert starts_jax("scalejax.mesh")


def jit_calls(tree: ast.Module) -> list[str]:
    """First arguments of the calls of `jax.jit`, as source."""
    return [
        ast.unparse(node.args[0]) if node.args else ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("jax.jit", "jit", "nnx.jit")
    ]


def test_training_step_is_jitted_once():
    """What is costed is what is trained: there is one `jax.jit` of the update."""
    calls = {module: jit_calls(tree) for module, tree in modules().items()}
    updates = [(m, call) for m, found in calls.items() for call in found if "_update" in call]

    assert updates == [("step", "partial(_update, recipe, mesh)")]


def test_step_and_evaluation_are_the_only_modules_that_jit_a_run():
    """Other modules call what these built; the tools that jit say why here."""
    jitting = {module for module, tree in modules().items() if jit_calls(tree)}
    others = jitting - {"step", "evaluation"}

    # they time small programs of their own: products, copies, exchanges
    others -= {"local_cluster", "calibrate.timing", "calibrate.probes"}
    others -= {"agreement"}  # it sums up the bits of a state, and changes none
    # it has the gradient and the optimizer that the step is made of, in another order
    others -= {"emulate.arithmetic"}
    assert others <= {"sweep.mapped"}  # it maps what they built over several runs


@pytest.mark.parametrize("source", ["jax.jit(partial(_update, r))", "nnx.jit(f)"])
def test_check_for_jit_can_fail(source: str):
    """The calls are recognised."""
    assert jit_calls(ast.parse(source))
