"""`step.export`: an artifact of all that a step has compiled."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync_fx.errors import OptionError
from gradsync_fx.options import Options
from gradsync_fx.runtime.artifact import write_artifact
from gradsync_fx.runtime.artifact_fit import inputs_as_text, settings_as_text
from gradsync_fx.runtime.atomic_files import FilePath
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.refusals import nothing_captured


def export(captures: Sequence[CapturedStep], options: Options, path: FilePath) -> None:
    """Writes what the programs of these captures were made into; what a flush needs is compiled, where it was not.

    Raises `WindowError` where nothing is captured, `OptionError` for another backend than Inductor, and `StateError`
    where nothing was kept, or the file cannot be written.
    """
    if options.backend != "inductor":
        raise OptionError(
            "step.export",
            seen=f"backend={options.backend!r}, which leaves nothing that another process could load",
            wanted='programs of backend="inductor"',
            fix="leave backend out",
        )
    if not captures:
        raise nothing_captured("step.export")
    for captured in captures:
        if captured.updates and options.accumulates:
            captured.programs.compiled(frozenset(captured.facts.parts), tail=True)
    programs = [p for captured in captures for p in captured.programs.by_name.values()]
    about = {
        "options": settings_as_text(options, captures[0].setting),
        "programs": [{"name": p.name, "inputs": inputs_as_text(p)} for p in programs],
    }
    write_artifact(path, about)
