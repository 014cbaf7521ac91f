"""What the commands do, once their arguments are parsed: what they work with is imported by then, torch too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gradsync_fx.cli import doctor as checks
from gradsync_fx.cli.diff import codes, to_sides
from gradsync_fx.cli.factory import Request, Target, Tell, make_report
from gradsync_fx.cli.outputs import STDOUT, check_outputs, out, save_output, show, write
from gradsync_fx.cli.plan import Wanted, as_data, make_plan, to_table
from gradsync_fx.cli.problems import REFUSED, USAGE, Problem, printable
from gradsync_fx.cli.subprocess_job import limited
from gradsync_fx.disk_cache import LIMIT, clear_entries, entries_folder, held_entries
from gradsync_fx.errors import OptionError, ToolchainError
from gradsync_fx.inspection.costs import PRESETS, Hardware, find_hardware
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.text import WIDTH, to_tables
from gradsync_fx.lowering.target.cards import Card, check_toolchain, find_card
from gradsync_fx.options import Options


def show_report(given: dict[str, Any]) -> None:
    """`inspect`. given: its arguments, by name. Raises `Problem`, as all commands do."""
    files = {name: given[name] for name in ("html", "json", "dot")}
    check_outputs(**files)
    card = _card(given["target"])
    preset = given["hardware"] or (card.hardware if card else "laptop")
    report = _report(given, _hardware(preset, given))
    if files["html"] is not None:
        save_output(files["html"], report.to_html)
    for path, text in ((files["json"], report.to_json), (files["dot"], report.to_dot)):
        if path is not None:
            write(path, text())
    if STDOUT not in (files["json"], files["dot"]):
        _show(to_tables(report))


def show_difference(given: dict[str, Any]) -> None:
    """`diff`."""
    output = given["json"]
    check_outputs(json=output)
    report = _report(given, find_hardware("laptop"))
    programs = codes(report)
    if len(programs) < 2:
        raise Problem(
            USAGE,
            "--gradient-accumulation-steps",
            f"{report.k}: every call is a boundary, so there is one program only",
            "two programs to compare",
            "pass 2 or more",
        )
    if output is not None:
        found = {"step": report.step, "k": report.k, "world_size": report.world_size}
        write(output, _json({**found, "programs": programs}))
    if output != STDOUT:
        console = Console()
        show(console, to_sides(report, console.width, unified=given["unified"]))


def show_choices(given: dict[str, Any]) -> None:
    """`plan`."""
    output = given["json"]
    check_outputs(json=output)
    wanted = Wanted.of(given["memory"], given["global_batch"], given["world_size"])
    machine = _hardware(given["hardware"] or "laptop", given)
    request = _request({**given, "gradient_accumulation_steps": "2"}, machine)
    found = _limited(partial(make_plan, request, wanted), request, given["timeout"])
    if output is not None:
        write(output, _json(as_data(found, wanted, request)))
    if output != STDOUT:
        _show(to_table(found, wanted, request))
    if not any(choice.fits for choice in found):
        raise typer.Exit(REFUSED)


def show_checks(output: str | None) -> None:
    """`doctor`. output: for its JSON."""
    check_outputs(json=output)
    err, found = Console(stderr=True), []
    styles = {checks.OK: "green", checks.WARN: "yellow", checks.FAIL: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    with err.status("looking at this machine"):
        for check in checks.examine():
            found.append(check)
            detail = Text(printable(check.detail))
            if check.fix:
                detail.append(f"\nwhat to do: {printable(check.fix)}", style="cyan")
            table.add_row(Text(check.status, styles[check.status]), check.name, detail)
    ok = all(check.status != checks.FAIL for check in found)
    if output is not None:
        write(output, _json({"ok": ok, "checks": [asdict(check) for check in found]}))
    if output != STDOUT:
        show(Console(), table)
    if not ok:
        raise typer.Exit(REFUSED)


def show_cache(output: str | None, *, clear: bool) -> None:
    """`cache`. output: for its JSON. clear: deletes the entries, and shows what there was."""
    check_outputs(json=output)
    folder, (entries, size) = entries_folder(), held_entries()
    deleted = clear_entries() if clear else 0
    if output is not None:
        found = {"folder": str(folder), "entries": entries, "bytes": size, "deleted": deleted}
        write(output, _json(found))
    if output != STDOUT:
        text = f"{entries} entries, {size / 2**20:.1f} MiB, at most {LIMIT // 2**20}\n{folder}"
        out(printable(f"{text}\n{deleted} deleted\n" if clear else f"{text}\n"))


def _report(given: dict[str, Any], machine: Hardware) -> Report:
    """The report for the arguments of a command. Raises `Problem`."""
    request = _request(given, machine)
    report: Report = _limited(partial(make_report, request), request, given["timeout"])
    return report


def _request(given: dict[str, Any], machine: Hardware) -> Request:
    """What the arguments of a command ask for. Raises `Problem`."""
    factory = Target.of(given["factory"])
    names = (
        "reduction", "bucket_cap_mb", "sync_each_batch", "skip_nonfinite", "broadcast_buffers",
        "accumulator_dtype", "reduce_dtype",
    )  # fmt: skip
    options = {name: given[name] for name in names if given.get(name) not in (None, False)}
    steps = given["gradient_accumulation_steps"]
    options["gradient_accumulation_steps"] = int(steps) if _is_number(steps) else steps
    for name in ("accumulator_dtype", "reduce_dtype"):
        if name in options:
            options[name] = getattr(torch, options[name], options[name])
    try:
        Options.of(options)
    except OptionError as error:
        raise Problem.of(USAGE, error) from error
    return Request(factory, given["world_size"], machine, options, given.get("target"))


def _limited(job: Callable[[Tell], Any], request: Request, timeout: float) -> Any:
    """What a job on the user's file gives, done in a process of its own. Raises `Problem`."""
    if not math.isfinite(timeout):
        raise Problem(USAGE, "--timeout", f"{timeout}", "a number of seconds", "0 is for no limit")
    err = Console(stderr=True)
    with err.status(Text("starting")) as status:
        return limited(
            job,
            timeout,
            str(request.target),
            request.target.file,
            tell=lambda doing: status.update(Text(f"{printable(doing)} ...")),
            show=lambda text: err.print(Text(text), end="", soft_wrap=True),
        )


def _card(target: str | None) -> Card | None:
    """Raises `Problem` for a target that is not known, or whose compilers are missing."""
    if target is None:
        return None
    try:
        card = find_card(target)
        check_toolchain(target)
    except OptionError as error:
        raise Problem.of(USAGE, error) from error
    except ToolchainError as error:
        raise Problem.of(REFUSED, error) from error
    return card


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _hardware(preset: str, given: dict[str, Any]) -> Hardware:
    """The preset, with the numbers that are given in place of its own."""
    numbers = {name: given[name] for name in ("latency", "bandwidth", "flops")}
    try:
        machine = find_hardware(preset)
    except OptionError as error:
        fix = f"pass one of them, or one and --{', --'.join(numbers)}"
        raise Problem(USAGE, error.culprit, error.seen, ", ".join(PRESETS), fix) from error
    changed = {name: value for name, value in numbers.items() if value is not None}
    for name, value in changed.items():
        least = 0.0 if name == "latency" else math.ulp(0.0)
        if not least <= value < math.inf:
            wanted = "a number of at least 0" if name == "latency" else "a number above 0"
            raise Problem(USAGE, f"--{name}", f"{value}", wanted, "pass one, or leave it out")
    return replace(machine, name=f"{preset}, changed", **changed) if changed else machine


def _show(tables: RenderableType) -> None:
    """Piped, as wide as print(report); on a terminal as wide as that."""
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), tables)


def _json(found: dict[str, Any]) -> str:
    return json.dumps({"version": 1, **found}, indent=1)
