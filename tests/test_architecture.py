"""The architecture as data: imports point down, private torch stays in one file, files stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gradsync_fx


ROOT = Path(gradsync_fx.__file__).parent
LAYERS = [
    ["effects", "errors", "gc_off", "shared_memory", "version"],
    [
        "integrity",
        "lost",
        "files",
        "dividing",
        "options",
        "_torch",
        "flat",
        "callers",
        "integrations",
        "integrations.lightning",
        "threads",
        "diagnosis",
        "diagnosis.findings",
    ],
    [
        "ops",
        "controls",
        "counters",
        "compile_once",
        "presence",
        "traces",
        "unallocated",
        "window",
        "diagnosis.graph",
    ],
    ["reached"],
    ["left_out", "zeroing"],
    ["footprint"],
    [
        "optimizer_state",
        "program",
        "flow",
        "observed",
        "journal",
        "refusals",
        "explained",
        "habits",
        "scaling",
        "eager",
        "eager.deeds",
        "eager.storages",
        "ranks",
        "remat",
        "diagnosis.events",
    ],
    ["untouched"],
    [
        "later",
        "drift",
        "gradient_values",
        "sparse",
        "recurrent",
        "in_place",
        "opaque",
        "replicas",
        "side_by_side",
        "canonicalize",
        "eager.discovery",
        "diagnosis.windows",
        "diagnosis.watch",
    ],
    ["step_arguments", "counts"],
    [
        "answers",
        "stages",
        "regions",
        "parallelism",
        "bodies",
        "state",
        "wire",
        "inspection.costs",
        "diagnosis.rules_of_gradients",
    ],
    ["collectives", "integrations.accelerate"],
    ["alike", "host_split", "as_compiled"],
    ["optimizer_trace"],
    ["rehearsal"],
    [
        "interception",
        "plan",
        "draft",
        "updates",
        "inspection",
        "inspection.data",
        "inspection.page",
        "diagnosis.rules",
    ],
    ["past_autograd", "with_updates"],
    ["capture", "inspection.text", "inspection.graphs", "inspection.tensors", "diagnose"],
    [
        "passes.sums",
        "passes.base",
        "passes.remain",
        "planning",
        "inlining",
        "fusible",
        "inspection.report",
    ],
    ["kernels", "overlap", "participate", "shareable", "symbolic"],
    ["verify", "check_lowered"],
    ["lowering"],
    ["passes.bucket", "passes.update"],
    ["passes.weigh"],
    ["passes.accumulate", "passes.reduce"],
    ["passes"],
    ["captured"],
    ["eager.step"],
    ["eager.effects"],
    ["eager.call", "eager.following", "eager.watch"],
    ["accumulators", "module_buffers", "copies", "inspection.flops", "inspection.remarks"],
    ["catalogue", "plain_window"],
    ["executor", "inspection.describe", "inspection.uncaptured", "own_errors"],
    ["between_calls", "saving", "eager.window", "self_check"],
    ["api"],
    ["explain", "backend", "integrations.transformers"],
    [""],
    ["commands", "commands.problems"],
    [
        "commands.arguments",
        "commands.outputs",
        "commands.sides",
        "commands.doctor",
        "commands.factory",
    ],
    ["commands.limited"],
    ["cli"],
    ["__main__"],
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [f"gradsync_fx.{m}" for m in modules()]
            found += [(name if name in known else node.module, node.lineno) for name in inside]
    return found


def test_every_module_has_a_layer() -> None:
    assert set(LAYER) == set(modules())


def test_imports_point_down() -> None:
    wrong = []
    for name, path in modules().items():
        for target, line in imports(path):
            if target.split(".")[0] != "gradsync_fx":
                continue
            inner = target.removeprefix("gradsync_fx").removeprefix(".")
            if LAYER[inner] >= LAYER[name]:
                wrong.append(f"{name}:{line} imports {inner}")
    assert wrong == []


def test_private_torch_stays_in_one_file() -> None:
    wrong = [
        f"{name}:{line} {target}"
        for name, path in modules().items()
        for target, line in imports(path)
        if name != "_torch"
        and target.startswith("torch.")
        and any(p.startswith("_") for p in target.split("."))
    ]
    assert wrong == []


# Attributes with such names that are not torch's, and those that torch has no public name for on every module.
NOT_PRIVATE_TO_TORCH = {
    "_getframe", "_exit",  # sys, os
    "_prepare_inputs",  # transformers.Trainer, for its subclasses
    "_enabled", "_cache_enabled",  # an autocast as Accelerate made it
    "_parameters", "_buffers",  # nn.Module's dictionaries: documented by what state_dict's hooks get
    "_schema",  # of an operator
}  # fmt: skip


def test_private_attributes_of_torch_stay_in_one_file() -> None:
    """By name: what no module of the package defines is somebody else's. Names of operators are left out."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    own = NOT_PRIVATE_TO_TORCH | {
        name for tree in trees.values() for node in ast.walk(tree) for name in defined(node)
    }
    wrong = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if name != "_torch"
        and isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and node.attr not in own
        and not re.match(r"(torch\.ops\.|_?aten\.)", ast.unparse(node))
    ]
    assert wrong == []


def defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []


def test_files_stay_small_and_say_what_they_are() -> None:
    for name, path in modules().items():
        assert len(path.read_text().splitlines()) <= 400, name
        assert ast.get_docstring(ast.parse(path.read_text())), name
