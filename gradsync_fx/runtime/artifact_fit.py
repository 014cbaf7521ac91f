"""Whether an artifact fits: what its programs were made for, and what is another here, in words.

machine, options, inputs there  beside  those here  ->  the first difference
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch

from gradsync_fx.capture.kept_graph import own_sources
from gradsync_fx.ir.program import Program, form_of
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting
from gradsync_fx.version import VERSION


# Options that no program depends on.
_BESIDE = {"artifact", "verbose", "self_check", "rank_timeout"}


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a file holds, and where it does not fit.

    options: as `settings_as_text` gives them. programs: name and inputs of each. misfits: versions, processor or
    compiler, in words. told: reasons that the user knows.
    """

    path: str
    options: dict[str, str]
    programs: list[dict[str, Any]]
    misfits: tuple[str, ...]
    told: set[str] = field(default_factory=set)

    def why_compiled(self, program: Program, options: Options, setting: Setting) -> str:
        """Why a program was compiled although there is an artifact, as far as can be seen."""
        if self.misfits:
            return "; ".join(self.misfits)
        here = settings_as_text(options, setting)
        changed = differences(self.options, here)
        if changed:
            return "; ".join(changed)
        alike = [p["inputs"] for p in self.programs if p["name"] == program.name]
        if not alike:
            return "it had not been compiled before step.export"
        inputs = inputs_as_text(program)
        if inputs in alike:
            return "the step, its model or its optimizer is another, or a setting of torch"
        return "; ".join(differences(alike[-1], inputs)[:3])


def differences(there: dict[str, str], here: dict[str, str]) -> list[str]:
    """What is another, or on one side only, by name."""
    names = dict.fromkeys((*there, *here))
    none = "nothing"
    return [
        f"{name} is {there.get(name, none)} there and {here.get(name, none)} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


@cache
def machine_as_text() -> dict[str, str]:
    """What the code of a compiler depends on, beside its command."""
    found = {
        "gradsync_fx": f"{VERSION} ({own_sources()[:8]})",
        "torch": f"{torch.__version__} ({str(torch.version.git_version)[:8]})",
        "Python": platform.python_version(),
        "the system": f"{sys.platform} {platform.machine()}",
        "the processor": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        found["the card"] = torch.cuda.get_device_name()
    return found


def settings_as_text(options: Options, setting: Setting) -> dict[str, str]:
    """The options that programs depend on, and the ranks. Where updates are shared out, each rank has its own."""
    found = {"the number of ranks": str(setting.world)}
    if options.shard_optimizer:
        found["the rank"] = str(setting.rank)
    for name in (f.name for f in fields(options) if f.name not in _BESIDE):
        value = getattr(options, name)
        if name == "gradient_accumulation_steps" and options.several_windows:
            value = list(options.steps)
        elif name == "without":
            value = sorted(value)
        elif name == "options":
            value = sorted((value or {}).items())
        elif name in ("process_group", "device_mesh", "commit", "on_update"):
            value = "none" if value is None else "given"
        found[name] = str(value)
    return found


def inputs_as_text(program: Program) -> dict[str, str]:
    """Shape, strides, dtype and device of each, by kind and name."""
    forms = zip(program.slots, program.inputs(), strict=True)
    return {f"{slot.kind.value} {slot.name}": form_of(value) for slot, value in forms}


def command_apart(there: str, here: str) -> str:
    """The first word in which two commands of the compiler differ."""
    one, other = (re.split(r"\s+", command) for command in (there, here))
    missing = [w for w in one if w not in other] or ["the same words in another order"]
    instead = [w for w in other if w not in one] or ["nothing"]
    return f"the C++ compiler was called with {missing[0]!r} there, and {instead[0]!r} here"
