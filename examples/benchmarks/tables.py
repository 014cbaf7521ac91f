"""The figures as Markdown."""

from results import Comparison, Spread


MIB = 2**20


def markdown(comparisons: list[Comparison], machine: dict[str, str]) -> str:
    parts = ["# Gradient synchronisation\n", *(f"- {k}: {v}" for k, v in machine.items()), ""]
    for comparison in comparisons:
        parts += [_heading(comparison), _speed(comparison), "", _cost(comparison), ""]
        if alone := _alone(comparison):
            parts += [alone, ""]
        parts += [
            f"- {f.title} does not run: {_one_line(f.failure)}"
            for f in comparison.figures
            if f.failure
        ]
        parts += [
            f"- **{f.title} computes something else**: losses differ by {f.deviation:.1e}"
            for f in comparison.figures
            if not f.equal
        ]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _heading(c: Comparison) -> str:
    size = f"{c.parameters / 1e6:.1f}M parameters ({c.parameters * 4 / MIB:.1f} MiB)"
    return f"## {c.workload}; {c.placement}\n\n{size}, k = {c.k}. Medians, quartiles in brackets.\n"


def _speed(c: Comparison) -> str:
    rows = []
    for f in c.figures:
        if f.failure:
            continue
        ratio = c.ratio(f)
        rows.append(
            [
                f.title,
                _seconds(f.micro_step),
                _seconds(f.accumulate),
                _seconds(f.boundary),
                "" if ratio is None else f"{ratio:.2f}",
                "" if f.deviation is None else f"{f.deviation:.0e}",
            ]
        )
    titles = ["way", "s per micro-step", "s per accumulate call", "s per boundary call"]
    return _table([*titles, "x fastest peer", "losses differ by"], rows)


def _cost(c: Comparison) -> str:
    rows = []
    for f in c.figures:
        if f.traffic is None:
            continue
        rows.append(
            [
                f.title,
                str(f.traffic["all_reduces"]),
                f"{f.traffic['payload'] / MIB:.2f}",
                str(f.traffic["others"]),
                _mib(f.sent),
                *([] if c.rate is None else [_share(c.hidden(f))]),
                f"{f.warm_up:.1f}",
                f"{f.first_calls:.1f}",
            ]
        )
    titles = ["way", "all-reduces per window", "their MiB", "other collectives", "MiB sent"]
    titles += [] if c.rate is None else ["of their seconds on the link, hidden"]
    return _table(
        [*titles, "s to the end of window 2, all in one process", "of these compiling"], rows
    )


def _alone(c: Comparison) -> str:
    rows = []
    for f in c.figures:
        if f.alone is None or "failure" in f.alone:
            continue
        memory = f.alone["memory"] or {}
        rows.append(
            [
                f.title,
                f"{f.alone['cold']:.1f}",
                f"{f.alone['compile']:.1f}",
                f"{f.alone['warm']:.1f}",
                _mib(memory.get("resting")),
                _mib(memory.get("peak")),
                _mib(memory.get("resident")),
            ]
        )
    if not rows:
        return ""
    titles = [
        "way, in a process of its own",
        "s to the end of window 2, cold caches",
        "of these compiling",
    ]
    titles += ["s with warm caches", "MiB of tensors at rest", "at the peak", "MiB of the process"]
    return _table(titles, rows)


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.4f} ({spread.low:.4f}-{spread.high:.4f})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _mib(count: float | None) -> str:
    return "" if count is None else f"{count / MIB:.1f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
