"""Writes gradsync_fx/inspection/report.schema.json from the report's dataclasses: `python tests/schema.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gradsync_fx.inspection.data import ReportData
from gradsync_fx.inspection.report import VERSION


PATH = Path(__file__).parents[1] / "gradsync_fx" / "inspection" / "report.schema.json"


def made() -> dict[str, Any]:
    """The schema: every field is required, and no other is allowed."""
    schema = TypeAdapter(ReportData).json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "gradsync_fx report"
    schema["properties"] = {"version": {"const": VERSION}, **schema["properties"]}
    for part in (schema, *schema["$defs"].values()):
        part["required"] = list(part["properties"])
        part["additionalProperties"] = False
    return schema


def text() -> str:
    return json.dumps(made(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
