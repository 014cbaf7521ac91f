"""The figures as a picture: for each way, what a micro-step of the window costs on average, in two parts."""

from pathlib import Path

from matplotlib.figure import Figure

from results import Comparison


COLOURS = {"accumulate": "#4c78a8", "boundary": "#f58518"}


def draw(comparisons: list[Comparison], files: list[Path]) -> None:
    """One panel for each comparison, bars in the order of the ways; the format is the file's ending."""
    tallest = max(len(c.figures) for c in comparisons)
    size = (9, len(comparisons) * (1.0 + 0.32 * tallest))
    figure = Figure(figsize=size, layout="constrained")
    for axes, comparison in zip(
        figure.subplots(len(comparisons), squeeze=False)[:, 0], comparisons, strict=True
    ):
        _panel(axes, comparison)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    for file in files:
        figure.savefig(file, dpi=150)


def _panel(axes, comparison: Comparison) -> None:
    shown = [f for f in comparison.figures if f.micro_step is not None][::-1]  # the first on top
    names = [f.title.replace("`", "") for f in shown]
    boundary = [1e3 * f.boundary.median / comparison.k for f in shown]
    whole = [1e3 * f.micro_step.median for f in shown]
    rest = [max(0.0, w - b) for w, b in zip(whole, boundary, strict=True)]
    spread = [
        [1e3 * (f.micro_step.median - f.micro_step.low) for f in shown],
        [1e3 * (f.micro_step.high - f.micro_step.median) for f in shown],
    ]
    axes.barh(names, rest, color=COLOURS["accumulate"], label="accumulate calls")
    axes.barh(
        names, boundary, left=rest, xerr=spread, color=COLOURS["boundary"], label="boundary call",
        error_kw={"elinewidth": 1, "capsize": 2},
    )  # fmt: skip
    axes.set_title(f"{comparison.workload}; {comparison.placement}; k = {comparison.k}", fontsize=9)
    axes.set_xlabel("ms per micro-step (median, quartiles)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
