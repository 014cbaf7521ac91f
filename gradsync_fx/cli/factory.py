"""Makes a report from `FILE.py:FACTORY`: loads the user's file, calls the factory, explains the step.

What the user's code does wrong becomes a `Problem` that names the user's line.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import gradsync_fx
from gradsync_fx._torch import FAKE_TENSOR_LOG
from gradsync_fx.cli.problems import RAISED, REFUSED, USAGE, Problem
from gradsync_fx.errors import GradSyncError, OptionError
from gradsync_fx.inspection.costs import Hardware
from gradsync_fx.inspection.report import Report
from gradsync_fx.options import Options


TARGETS = "FILE.py:FACTORY or package.module:FACTORY"
RETURNS = "(train_step, args) or (train_step, args, kwargs)"
Tell = Callable[[str], None]  # what is being done now


@dataclass(frozen=True, slots=True)
class Target:
    """Where a factory is. file: "" where `module` is a name to import."""

    file: str
    module: str
    factory: str

    @classmethod
    def of(cls, text: str) -> Target:
        """Parses, and looks for the file. Raises `Problem`."""
        where, colon, factory = text.rpartition(":")
        if not (colon and where and factory):
            raise Problem(
                USAGE, text, "names no factory", TARGETS, "put a colon and its name after it"
            )
        if not (where.endswith(".py") or os.sep in where or Path(where).is_file()):
            return cls("", where, factory)
        path = Path(where)
        if path.is_dir() or not path.exists():
            seen = "is a folder" if path.is_dir() else "there is no such file"
            raise Problem(USAGE, where, seen, TARGETS, f"look for it from {Path.cwd()}")
        return cls(str(path.resolve()), path.stem, factory)

    def __str__(self) -> str:
        return f"{_short(self.file) or self.module}:{self.factory}"


@dataclass(frozen=True, slots=True)
class Request:
    """What to explain: a factory, a number of ranks, a machine, and options of `optimize`. card: to make code for."""

    target: Target
    world_size: int | None
    hardware: Hardware
    options: dict[str, Any] = field(default_factory=dict)
    card: str | None = None


def make_report(request: Request, tell: Tell) -> Report:
    """Loads, calls, explains; runs no step. Raises `Problem`."""
    with made(request.target, tell) as call:
        step, args, kwargs = call()
        tell(f"capturing {getattr(step, '__name__', 'the step')}")
        with told(request.target, step):
            return gradsync_fx.explain(
                step,
                *args,
                world_size=request.world_size,
                hardware=request.hardware,
                target=request.card,
                **request.options,
                **kwargs,
            )


@contextmanager
def made(target: Target, tell: Tell) -> Iterator[Made]:
    """The factory, loaded; it can be called in the block. Raises `Problem`."""
    with _as_a_script(target):
        tell(f"loading {_short(target.file) or target.module}")
        factory = _factory(target, _load(target))
        tell(f"calling {target.factory}")
        yield Made(target, factory)


@dataclass(frozen=True, slots=True)
class Made:
    """A user's factory."""

    target: Target
    factory: Callable[..., Any]

    def takes(self, name: str) -> bool:
        return name in inspect.signature(self.factory).parameters

    def __call__(self, **given: Any) -> tuple[Any, tuple[Any, ...], Any]:
        """The step, its positional and its named arguments. Raises `Problem`."""
        return _call(self.target, self.factory, **given)


@contextmanager
def _as_a_script(target: Target) -> Iterator[None]:
    """sys.path and sys.argv as `python FILE.py` would have them."""
    path, argv = list(sys.path), list(sys.argv)
    sys.path.insert(0, str(Path(target.file).parent) if target.file else os.getcwd())
    sys.argv[:] = [target.file or target.module]
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, argv


def _load(target: Target) -> ModuleType:
    if not target.file:
        return _import(target)
    # Not under its own name: a user's json.py must not take json's place.
    name = f"gradsync_fx_target_{target.module}"
    loader = SourceFileLoader(name, target.file)
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise AssertionError(f"no spec for {target.file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        raise _raised(target, error, "while the file was loaded", target.file) from error
    return module


def _import(target: Target) -> ModuleType:
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name and f"{target.module}.".startswith(f"{error.name}."):
            seen = f"there is no module {error.name!r}"
            fix = f"a file's name ends in .py; modules are looked for from {Path.cwd()}"
            raise Problem(USAGE, target.module, seen, TARGETS, fix) from error
        raise _raised(target, error, "while the module was imported") from error
    except BaseException as error:
        raise _raised(target, error, "while the module was imported") from error


def _factory(target: Target, module: ModuleType) -> Callable[..., Any]:
    found = getattr(module, target.factory, None)
    if callable(found):
        return found
    functions = [n for n, f in vars(module).items() if inspect.isfunction(f)]
    own = [n for n in functions if vars(module)[n].__module__ == module.__name__]
    near = difflib.get_close_matches(target.factory, functions, n=1)
    raise Problem(
        USAGE,
        str(target),
        f"is a {type(found).__name__}, not a function"
        if found is not None
        else "the file has no such function",
        f"a function that returns {RETURNS}" + (f"; there are {', '.join(own)}" if own else ""),
        f"did you mean {near[0]}?" if near else "write one, or name another",
    )


def _call(
    target: Target, factory: Callable[..., Any], **given: Any
) -> tuple[Any, tuple[Any, ...], Any]:
    line = _line(factory) or str(target)
    try:
        result = factory(**given)
    except BaseException as error:
        raise _raised(target, error, f"in {target.factory}()", line) from error

    def wrong(seen: str, fix: str) -> Problem:
        return Problem(RAISED, line, f"{target.factory}() {seen}", RETURNS, fix)

    if not isinstance(result, tuple) or len(result) not in (2, 3):
        count = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise wrong(f"returned a {type(result).__name__}{count}", "return the step with its args")
    step, args, kwargs = result if len(result) == 3 else (*result, {})
    if not callable(step):
        raise wrong(f"returned a {type(step).__name__} as train_step", "return the function first")
    if not isinstance(args, tuple | list):
        fix = "put the step's arguments in a tuple: return train_step, (model, optimizer, x)"
        raise wrong(f"returned args as a {type(args).__name__}", fix)
    if not isinstance(kwargs, Mapping) or not all(isinstance(k, str) for k in kwargs):
        raise wrong(f"returned kwargs as a {type(kwargs).__name__}", "return a dict of names")
    taken = {"world_size", "hardware", "target", *(f.name for f in fields(Options))} & set(kwargs)
    if taken:
        names = ", ".join(sorted(taken))
        raise wrong(f"returned kwargs named like options ({names})", "pass those by position")
    return step, tuple(args), kwargs


@contextmanager
def told(target: Target, step: Any) -> Iterator[None]:
    """Errors of a capture become a `Problem`."""
    line = _line(step) or str(target)
    # It logs a traceback of its own before the error that says the same in a line.
    logger = logging.getLogger(FAKE_TENSOR_LOG)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except OptionError as error:
        raise Problem.of(USAGE, error, _trace(error)) from error
    except GradSyncError as error:
        raise Problem.of(REFUSED, error, _trace(error)) from error
    except BaseException as error:
        raise _raised(target, error, "while the step was captured", line) from error
    finally:
        logger.setLevel(level)


def _raised(target: Target, error: BaseException, when: str, line: str = "") -> Problem:
    """The user's code raised: where in the user's file, and what. Raises `KeyboardInterrupt` on."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if target.file and f.filename == target.file]
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_short(error.filename)}:{error.lineno}"
    elif own:
        place = f"{_short(own[-1].filename)}:{own[-1].lineno}"
    else:
        place = _short(line) or str(target)
    if isinstance(error, GradSyncError):
        return Problem(RAISED, place, f"{when}: {error}", trace=_trace(error))
    says = error.msg if isinstance(error, SyntaxError) else _text(error)
    seen = f"{type(error).__name__}{': ' + says if says else ''} ({when})"
    fix = "run the file alone; it has to work without gradsync-fx"
    return Problem(RAISED, place, seen, fix=fix, trace=_trace(error))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _line(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def _short(path: str) -> str:
    """From the current folder, where it lies inside."""
    start = os.getcwd() + os.sep
    return path.removeprefix(start)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:
        return f"its text cannot be had ({type(worse).__name__})"
