"""The architecture as data: who may import whom, private torch in one file, small files, mirrored tests."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import gradsync_fx


ROOT = Path(gradsync_fx.__file__).parent
TESTS = Path(__file__).parent
# Flat in the package: what everybody may import, and what users come in by ("" is the package itself).
GROUND = {
    "errors",
    "version",
    "choices",
    "options",
    "_torch",
    "_torch_aot",
    "_torch_cpp",
    "_torch_cuda",
    "disk_cache",
    "threads",
    "user_lines",
    "scaling",
    "gc_off",
    "wording",
    "progress",
    "update_record",
    "code_uses",
    "classes",
}
DOORS = {
    "",
    "api",
    "optimized_step",
    "dispatch",
    "backend",
    "explanation",
    "calibration",
    "eager_loops",
    "script_watch",
}
# Run with `python -m`: they are the command line.
RUN = {"__main__", "diagnose"}
# The rules: what each folder may import beside itself and the ground, in the order of the work.
ARROWS = {
    "ir": (),
    "comm": ("ir",),
    "optim": ("ir",),
    "capture": ("ir", "comm", "optim"),
    "planning": ("ir", "comm", "optim", "capture"),
    "passes": ("ir", "comm", "optim", "planning"),
    "lowering": ("ir", "comm", "passes"),
    "runtime": ("ir", "comm", "optim", "capture", "planning", "passes", "lowering"),
    "checking": ("ir", "optim", "capture", "planning", "runtime"),
    "diagnosis": (),
    "eager": ("ir", "comm", "optim", "capture", "planning", "runtime", "checking", "diagnosis"),
    "inspection": ("ir", "optim", "capture", "planning", "passes", "lowering", "runtime", "eager"),
    "doors": (
        "comm",
        "capture",
        "lowering",
        "runtime",
        "checking",
        "diagnosis",
        "eager",
        "inspection",
    ),
    "integrations": ("doors",),
    "conversion": (),
    "cli": ("lowering", "inspection", "doors", "conversion"),
}
# The judge shares no code with these.
JUDGED = {"passes", "lowering", "runtime", "eager"}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def room(name: str) -> str:
    """The folder of a module, or what it is among the flat ones."""
    folder = name.partition(".")[0]
    if folder in GROUND:
        return "ground"
    if folder in DOORS:
        return "doors"
    return "cli" if folder in RUN else folder


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            known = {f"gradsync_fx.{m}" for m in modules()}
            found += [(name if name in known else node.module, node.lineno) for name in inside]
    return found


def own_imports(path: Path) -> list[tuple[str, int]]:
    """Of modules of the package, by their names within it."""
    return [
        (target.removeprefix("gradsync_fx").removeprefix("."), line)
        for target, line in imports(path)
        if target.split(".")[0] == "gradsync_fx"
    ]


def reached_from(names: set[str]) -> set[str]:
    reached: set[str] = set()
    while names:
        reached |= names
        names = {t for name in names for t, _ in own_imports(modules()[name])} - reached
    return reached


def test_every_module_has_a_room() -> None:
    flat = {name for name, path in modules().items() if path.parent == ROOT}
    assert flat == GROUND | DOORS | RUN
    assert {room(name) for name in modules()} == {"ground", *ARROWS}


def test_folders_import_as_the_rules_say() -> None:
    wrong = [
        f"{name}:{line} imports {target}"
        for name, path in modules().items()
        for target, line in own_imports(path)
        if room(target) not in {room(name), "ground", *ARROWS.get(room(name), ())}
    ]
    assert wrong == []


def test_no_arrow_runs_back_up() -> None:
    order = list(ARROWS)
    assert all(
        order.index(below) < order.index(folder) for folder in order for below in ARROWS[folder]
    )


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: {t for t, _ in own_imports(path)} for name, path in modules().items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)


def test_folders_say_what_they_may_import() -> None:
    for folder in ARROWS.keys() - {"doors"}:
        says = ast.get_docstring(ast.parse(modules()[folder].read_text())) or ""
        allowed = ", ".join(ARROWS[folder]) or "the ground alone"
        assert says.endswith(f"\nMay import: {allowed}."), folder


def test_the_judge_shares_no_code_with_what_it_judges() -> None:
    reached = reached_from({"checking.reference_window", "checking.copies"})
    assert {name for name in reached if room(name) in JUDGED} == set()


def test_tests_mirror_the_folders() -> None:
    """A test in a folder is of the module of its name; what tests the whole lies flat."""
    wrong = [
        f"{folder}/{path.name}"
        for folder in ARROWS
        for path in TESTS.glob(f"{folder}/test_*.py")
        if f"{folder}.{path.stem.removeprefix('test_')}" not in modules()
    ]
    assert wrong == []


def test_every_module_is_reached_by_a_test() -> None:
    """From what tests import, the package itself and its command line among it. Folders that only say so are none."""
    tried = {target for path in TESTS.rglob("*.py") for target, _ in own_imports(path)}
    code = {m for m, path in modules().items() if len(ast.parse(path.read_text()).body) > 1}
    assert code - reached_from({*tried, *RUN}) == set()


PRIVATE_TORCH = {
    "_torch",
    "_torch_aot",
    "_torch_cpp",
    "_torch_cuda",
}  # always; and where code for a CUDA target is made


def test_private_torch_stays_in_its_files() -> None:
    wrong = [
        f"{name}:{line} {target}"
        for name, path in modules().items()
        for target, line in imports(path)
        if name not in PRIVATE_TORCH
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


def test_private_attributes_of_torch_stay_in_its_files() -> None:
    """By name: what no module of the package defines is somebody else's. Names of operators are left out."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    own = NOT_PRIVATE_TO_TORCH | {
        name for tree in trees.values() for node in ast.walk(tree) for name in defined(node)
    }
    wrong = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if name not in PRIVATE_TORCH
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


# Names that two modules define all the same, each with the reason.
SHARED_NAMES: dict[str, str] = {}


def public_definitions(tree: ast.Module) -> set[str]:
    """Classes, functions and type aliases of a module, without a leading underscore; overloads count once."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and not is_type_variable(node.value):
            names = {t.id for t in node.targets if isinstance(t, ast.Name)}
            found |= {name for name in names if name[0].isupper() and not name.isupper()}
    return {name for name in found if not name.startswith("_")}


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def test_one_name_names_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for module, path in modules().items():
        for name in public_definitions(ast.parse(path.read_text())):
            where.setdefault(name, []).append(module)
    twice = {name: found for name, found in where.items() if len(found) > 1}
    assert {n: found for n, found in twice.items() if n not in SHARED_NAMES} == {}
    assert SHARED_NAMES.keys() - twice.keys() == set(), "an exception that is none any more"
