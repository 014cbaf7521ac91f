"""The report as tables for the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradsync_fx.inspection.data import Collective, ReportData
from gradsync_fx.wording import number_of


WIDTH = 100
FEW = 3  # lines of a region that a table shows
MANY = 6  # buckets that a table shows all of; of more, the first three and the last
SHORT = 40  # characters of names that a row has room for
KIB = 1024.0


def to_text(report: ReportData, width: int = WIDTH) -> str:
    """Plain text, `width` columns at most."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(to_tables(report))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


def to_tables(report: ReportData) -> RenderableType:
    """For a `rich` console of the caller's."""
    where = f"  ({report.line})" if report.line else ""
    simulated = ", simulated" if report.simulated else ""
    k = "k = manual"
    if isinstance(report.k, int):
        k = f"k = {number_of(report.k, 'micro-step')}"
    parts: list[RenderableType] = [
        Text(f"{report.step}{where}", style="bold"),
        Text(f"one window: {k}, {number_of(report.world_size, 'rank')}{simulated}"),
        Text(f"gradient = {report.scale.formula}"),
        _before_after(report),
        _levels(report),
        _sharing(report),
        _once(report),
        _collectives(report),
        _regions(report),
        _programs(report),
        _memory(report),
        _prediction(report),
        _code(report),
        _measured(report),
    ]
    for kept in report.kept:
        parts.append(Text(f"kept: {kept.op} at {kept.line}: {kept.why}"))
    for moved in report.moved:
        parts.append(Text(f"moved: {moved}"))
    for refusal in report.refusals:
        parts.append(Text(f"declined: {refusal}"))
    if report.unused_parameters:
        parts.append(Text(f"no gradient: {', '.join(report.unused_parameters)}"))
    for warning in report.warnings:
        parts.append(Text(f"warning: {warning}", style="yellow"))
    return Group(*parts)


def _table(*columns: str, text: str = "") -> Table:
    """text: the column beside the first that holds words, not numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        words = i == 0 or column == text
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def _spaced(table: Table) -> RenderableType:
    return Padding(table, (1, 0, 0, 0)) if table.row_count else Text("", end="")


def _before_after(report: ReportData) -> RenderableType:
    table = _table("per window", "before", "after")
    before, after = report.collectives_before, report.collectives_after
    table.add_row("gradient collectives", str(before), str(after))
    table.add_row("bytes per rank", f"{report.bytes_before:,}", f"{report.bytes_after:,}")
    return _spaced(table)


def _levels(report: ReportData) -> RenderableType:
    table = _table("level", "ranks", "bytes that a rank sends per window")
    for level in report.levels:
        table.add_row(level.name, str(level.ranks), f"{level.bytes:,}")
    return _spaced(table)


def _sharing(report: ReportData) -> RenderableType:
    """What this rank has of updates that are shared out."""
    found = report.sharing
    if found is None:
        return Text("", end="")
    table = _table("updates shared out", "on this rank", "in all")
    state, whole = binary(found.state_bytes), binary(found.whole_state_bytes)
    table.add_row("optimizer state", state, whole)
    owned = dict.fromkeys(sorted(set(found.owners.values())), 0)
    for rank in found.owners.values():
        owned[rank] += 1
    parts = [f"a piece on each rank: {number_of(len(found.cut), 'parameter')}"]
    parts += [f"wholly on rank {r}: {number_of(n, 'parameter')}" for r, n in owned.items()]
    sent = f"sums {binary(found.sums_bytes)}, new parameters {binary(found.parameters_bytes)}"
    if found.other_bytes:
        sent += f", norms and whole gradients {binary(found.other_bytes)}"
    return Group(
        _spaced(table),
        Text("; ".join(parts)),
        Text(f"given by a rank to the others per window: {sent}"),
    )


def _once(report: ReportData) -> RenderableType:
    """What a window computes once."""
    found = report.once
    if found is None or not found.held:
        return Text("", end="")
    table = _table("once per window", "bytes", "of", "line", text="of")
    shown = found.held if len(found.held) <= MANY else found.held[:FEW]
    for value in shown:
        first, *others = value.of or ("constants",)
        of = f"{first} and {len(others)} more" if others else first
        table.add_row(f"{value.what}: {value.op}", f"{value.bytes:,}", of, value.line)
    if len(found.held) > len(shown):
        table.add_row(f"{len(found.held) - len(shown)} more", "", "", "")
    part = f"{found.saved / found.calls:.0%} of its calls' time" if found.calls else "nothing"
    told = f"held: {binary(found.bytes)}; saved in a window, estimated: {part}"
    if found.launches is not None and found.moved is not None:
        each = f"{number_of(found.launches, 'launch')} and {binary(found.moved)} moved"
        told += f"; in each accumulate call on the target: {each} less"
    return Group(_spaced(table), Text(told))


def _collectives(report: ReportData) -> RenderableType:
    """A row for each bucket; of many, the first three and the last, and one row for those between. JSON has all.

    The way that buckets go has a column where it is not the wire for all of them, or parameters come back.
    """
    found = report.collectives
    told = any(c.way != "wire" or c.way_back for c in found)
    columns = ["bucket", "bytes", "dtype", "op", "ranks", "in", *(["way"] if told else [])]
    table = _table(*columns, "parameters", text="parameters")
    shown = len(found) if len(found) <= MANY else FEW
    for c in found[:shown]:
        _collective(table, c, told)
    if between := found[shown:-1]:
        least, most = (binary(pick(c.bytes for c in between)) for pick in (min, max))
        each = f"all {least}" if least == most else f"{least} to {most}"
        names = number_of(sum(len(c.parameters) for c in between), "parameter")
        empty = [""] * (len(columns) - 1)
        table.add_row("...", *empty, f"{len(between)} more, {each}: {names}")
        _collective(table, found[-1], told)
    return _spaced(table)


def _collective(table: Table, c: Collective, told: bool) -> None:
    first, *others = c.parameters
    names = ", ".join(c.parameters)
    if len(names) > SHORT:
        names = f"{first} and {len(others)} more" if others else first
    programs = ", ".join(c.programs)
    cells = [str(c.bucket), f"{c.bytes:,}", c.dtype, c.op, str(c.ranks), programs]
    if told:
        cells.append(f"{c.way}, back {c.way_back}" if c.way_back else c.way)
    table.add_row(*cells, names)


def binary(size: int) -> str:
    """`1.0 MiB`."""
    if size < KIB:
        return number_of(size, "byte")
    return f"{size / KIB:.1f} KiB" if size < KIB**2 else f"{size / KIB**2:.1f} MiB"


def _regions(report: ReportData) -> RenderableType:
    table = _table("region", "nodes", "lines", text="lines")
    for region in filter(lambda region: region.nodes, report.regions):
        lines = ", ".join(line.rsplit("/", 1)[-1] for line in region.lines[:FEW])
        more = len(region.lines) - FEW
        table.add_row(region.role, str(region.nodes), lines + (f" +{more}" if more > 0 else ""))
    return _spaced(table)


def _programs(report: ReportData) -> RenderableType:
    table = _table("program", "nodes", "collectives", "compiled in")
    for program in report.programs:
        seconds = program.compile_seconds
        took = "not compiled" if seconds is None else f"{seconds:.1f} s"
        table.add_row(program.name, str(program.nodes), str(program.collectives), took)
    return _spaced(table)


def _prediction(report: ReportData) -> RenderableType:
    found = report.predicted
    table = _table(f"estimate ({found.hardware.name})", "per window")
    table.add_row("compute", seconds_text(found.compute))
    table.add_row("communication", seconds_text(found.communication))
    table.add_row("of it during backward", seconds_text(found.hidden))
    table.add_row("of it exposed", seconds_text(found.communication - found.hidden))
    longer = _longer(report)
    if longer is not None:
        table.add_row("measured: boundary less accumulate", seconds_text(longer))
    table.add_row("window", seconds_text(found.window))
    table.add_row("window, every micro-step synced", seconds_text(found.window_synced))
    if report.world_size < 2:
        return _spaced(table)
    faster = _table("k", *(str(k) for k, _ in found.speedup))
    faster.add_row("speed-up over syncing each", *(f"{s:.2f}x" for _, s in found.speedup))
    hidden = found.hidden_from
    until = f"from k = {hidden}" if hidden is not None else "for no k up to 64"
    return Group(_spaced(table), _spaced(faster), Text(f"communication is hidden {until}"))


def _longer(report: ReportData) -> float | None:
    """How much longer a boundary took than an accumulate call, its update included; None where one never ran."""
    took = {p.name: p.seconds / p.calls for p in report.programs if p.calls}
    if not {"accumulate", "boundary"} <= took.keys():
        return None
    return max(0.0, took["boundary"] - took["accumulate"])


def _code(report: ReportData) -> RenderableType:
    """What was made for a target: a row for each program; JSON and the page have the kernels."""
    if report.code is None:
        return Text("", end="")
    table = _table(
        f"code for {report.code.target}", "kernels", "launches", "buffers", "registers", "spill",
        "moved", "estimate", "CUDA graph", text="CUDA graph",
    )  # fmt: skip
    parts = []
    for program in report.code.programs:
        made = [k for k in program.kernels if k.kind == "triton"]
        table.add_row(
            program.name,
            str(len(program.kernels)),
            str(program.launches),
            str(program.temporaries),
            str(max((k.registers for k in made), default=0)),
            str(sum(k.spilled > 0 for k in made)),
            binary(program.bytes),
            seconds_text(program.seconds),
            program.recording.verdict,
        )
        if program.recording.why:
            parts.append(Text(f"{program.name}, outside: {'; '.join(program.recording.why)}"))
    return Group(_spaced(table), *parts)


def _memory(report: ReportData) -> RenderableType:
    """What one rank needs, by program; an estimate."""
    if report.memory is None:
        return Text("", end="")
    held = report.memory.held
    size = sum(held.values())
    table = _table("memory", "held", "temporary", "peak", "at", text="at")
    for program in report.memory.programs:
        row = (size, program.temporaries, size + program.temporaries)
        table.add_row(program.name, *map(binary, row), program.line.rpartition("/")[2])
    kinds = ", ".join(f"{kind} {binary(n)}" for kind, n in held.items())
    return Group(_spaced(table), Text(f"held: {kinds}"))


def _measured(report: ReportData) -> RenderableType:
    table = _table("measured (host)", "calls", "per call")
    for program in report.programs:
        if program.calls:
            per_call = seconds_text(program.seconds / program.calls)
            table.add_row(program.name, str(program.calls), per_call)
    return _spaced(table)


def seconds_text(seconds: float) -> str:
    """`1.23 ms`: three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
