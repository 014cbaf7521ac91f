"""Real text that every machine with Python has: the standard library's own sources."""

import ast
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path


NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(package: str = "") -> list[bytes]:
    """The .py files of one package, or of all, without tests; the same order on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((root / package).rglob("*.py"))
    found = [p for p in files if not NOT_TEXT.intersection(p.relative_to(root).parts)]
    if not found:
        raise SystemExit(f"no Python sources in {root / package}: this example trains on them")
    return [p.read_bytes() for p in found]


def divided() -> tuple[bytearray, bytearray]:
    """All of it, in one piece: what to train on, and every 20th file, held out."""
    files = sources()
    training = b"".join(text for i, text in enumerate(files) if i % 20)
    return bytearray(training), bytearray(b"".join(files[::20]))


def docstrings(packages: Sequence[str]) -> list[tuple[str, int]]:
    """Each docstring with its package's place in the list; shuffled, the same on every rank."""
    found: dict[str, int] = {}
    for label, package in enumerate(packages):
        for source in sources(package):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                    found.setdefault(text, label)
    pairs = list(found.items())
    random.Random(0).shuffle(pairs)
    return pairs
