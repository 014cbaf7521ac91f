"""An artifact: what compiling a step left in torch's cache folder, in one file. Who loads it has nothing to compile.

    prepare -> cache folder -> export.py -> file
    file -> load_artifact -> cache folder -> first call: traced by Dynamo, and all else is found there

Nothing depends on an artifact being right: it only adds files to caches, which find them by all that they were made
of (kept_graph.py, kernels_together.py, Inductor's own keys). So whatever differs is compiled as usual; what does is
named, with what is another here (artifact_fit.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradsync_fx._torch import dynamo_counters, inductor_cache_dir
from gradsync_fx._torch_cpp import compile_command, probes_of_instructions, write_atomic
from gradsync_fx.disk_cache import keeps_entries, used_files
from gradsync_fx.errors import OptionError, StateError
from gradsync_fx.ir.program import Program
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting
from gradsync_fx.runtime.artifact_fit import (
    Artifact,
    command_apart,
    differences,
    machine_as_text,
)
from gradsync_fx.runtime.atomic_files import FilePath, in_place_of
from gradsync_fx.user_lines import warn_user


log = logging.getLogger(__name__)

_FORMAT = 1
_ABOUT, _TORCHS, _FILES = "about.json", "torch", "files/"
# What reading a file of another origin ends in.
_DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


def write_artifact(path: FilePath, about: dict[str, Any]) -> None:
    """What this process has in caches, with what is said about it. Raises `StateError` where that is nothing."""
    kept = torch.compiler.save_cache_artifacts() if keeps_entries() else None
    if kept is None:
        raise StateError(
            f"file {str(path)!r}",
            seen="nothing that was compiled is in torch's caches",
            wanted='programs of backend="inductor", with these caches on',
            fix="leave TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE unset",
        )
    files = {**used_files(), **probes_of_instructions(inductor_cache_dir())}
    contents = {name: file.read_bytes() for name, file in files.items()}
    about = {
        "format": _FORMAT,
        "machine": machine_as_text(),
        "compiler": compile_command(),
        **about,
        "digests": {name: _digest(content) for name, content in contents.items()},
        "torch": _digest(kept[0]),
    }
    packed = zipfile.ZIP_DEFLATED
    with in_place_of(path) as beside, zipfile.ZipFile(beside, "x", packed) as archive:
        archive.writestr(_ABOUT, json.dumps(about, indent=1))
        archive.writestr(_TORCHS, kept[0])
        for name, content in contents.items():
            archive.writestr(f"{_FILES}{name}", content)


# By file, the time of its last change, and the cache folder that it was put into.
_LOADED: dict[tuple[str, int, str], Artifact] = {}


def load_artifact(path: FilePath) -> Artifact:
    """Puts what the file holds into this user's cache folder, once. Raises `OptionError` where there is no such file.

    A file that is damaged, or was made by other versions, is named in a warning and left alone.
    """
    file = os.path.realpath(path)
    try:
        changed = os.stat(file).st_mtime_ns
    except OSError as failure:
        raise OptionError(
            "argument 'artifact'",
            seen=f"{str(path)!r}, which cannot be read ({failure.strerror})",
            wanted="a file of step.export(path)",
            fix="leave it out once, call step.prepare(...) and step.export(path), and give that path",
        ) from None
    key = (file, changed, inductor_cache_dir())
    if key not in _LOADED:
        try:
            with zipfile.ZipFile(file) as archive:
                artifact = _load(str(path), archive)
        except _DAMAGE as failure:
            why = f"it is damaged, or no file of step.export ({type(failure).__name__}: {failure})"
            artifact = Artifact(str(path), {}, [], (why,))
        _LOADED[key] = artifact
        if artifact.misfits:
            _tell(
                artifact,
                "does not fit, and programs are compiled as usual",
                "; ".join(artifact.misfits),
            )
    return _LOADED[key]


def _load(path: str, archive: zipfile.ZipFile) -> Artifact:
    about = json.loads(archive.read(_ABOUT))
    if about["format"] != _FORMAT:
        raise ValueError(f"its format is {about['format']}, and {_FORMAT} is read")
    misfits = differences(about["machine"], machine_as_text())
    if not misfits:
        _unpack(archive, about)
        # Asked for now: what it looks for may have been in the artifact.
        command = compile_command()
        if command != about["compiler"]:
            misfits = [command_apart(about["compiler"], command)]
    return Artifact(path, about["options"], about["programs"], tuple(misfits))


def _unpack(archive: zipfile.ZipFile, about: dict[str, Any]) -> None:
    """Into the cache folder, when all of it has been looked at."""
    kept, folder = archive.read(_TORCHS), Path(inductor_cache_dir())
    contents = {name: archive.read(f"{_FILES}{name}") for name in about["digests"]}
    for name, content in contents.items():
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} lies outside of the cache folder")
        if _digest(content) != about["digests"][name]:
            raise ValueError(f"the checksum of {name} is wrong")
    if _digest(kept) != about["torch"]:
        raise ValueError("the checksum of torch's part is wrong")
    for name, content in contents.items():
        if not (folder / name).exists():
            write_atomic(str(folder / name), content, make_dirs=True)
    torch.compiler.load_cache_artifacts(kept)
    log.info("%d files and torch's own entries were put into %s", len(contents), folder)


@contextmanager
def looked_up(program: Program, options: Options, setting: Setting) -> Iterator[None]:
    """The block compiles a program. Names what the artifact, if there is one, does not have of it."""
    missed, bypassed = _compiled_so_far()
    yield
    if options.artifact is None:
        return
    missed_now, bypassed_now = _compiled_so_far()
    artifact = _loaded(options.artifact)
    if missed_now > missed:
        why = artifact.why_compiled(program, options, setting)
    elif bypassed_now > bypassed:
        why = "torch keeps a part of it in no cache"
    else:
        return
    _tell(artifact, f"has not all of the {program.name} program, which is compiled", why)


def _loaded(path: FilePath) -> Artifact:
    """The latest that was loaded from there: a step that is being compiled has loaded it when it was made."""
    file = os.path.realpath(path)
    return next(a for (known, _, _), a in reversed(_LOADED.items()) if known == file)


def _compiled_so_far() -> tuple[int, int]:
    """Graphs that Inductor did not find, and those that it did not look for."""
    counts = dynamo_counters["inductor"]
    return counts["fxgraph_cache_miss"], counts["fxgraph_cache_bypass"]


def _tell(artifact: Artifact, what: str, why: str) -> None:
    if why not in artifact.told:
        artifact.told.add(why)
        warn_user(f"artifact {artifact.path!r} {what}: {why}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
