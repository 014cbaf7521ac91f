"""`Report`: the data of a report, with its views as methods."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import networkx as nx

from gradsync_fx.inspection.data import ReportData
from gradsync_fx.inspection.graphs import to_dot, to_networkx
from gradsync_fx.inspection.page import to_html
from gradsync_fx.inspection.text import to_text


VERSION = 1


@dataclass(frozen=True, slots=True)
class Report(ReportData):
    """What a step does and what the rewrite changed: see `ReportData` for the fields; `print(report)` for tables."""

    def __str__(self) -> str:
        return to_text(self)

    def to_json(self) -> str:
        """All of it as JSON; `schema()` describes it, and its `version` changes when a field changes its meaning."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page, to look at in a browser; written to `path` as well, where one is given."""
        return _written(to_html(self.to_json()), path)

    def to_dot(self, path: str | Path | None = None) -> str:
        """Text for graphviz; written to `path` as well, where one is given."""
        return _written(to_dot(self), path)

    def to_networkx(self) -> nx.DiGraph:
        """The boundary program as a graph; its attributes are told in graphs.py."""
        return to_networkx(self)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def schema() -> dict[str, Any]:
    """The JSON schema of `Report.to_json`."""
    text = (files("gradsync_fx.inspection") / "report.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
