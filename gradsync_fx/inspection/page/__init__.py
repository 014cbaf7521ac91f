"""The report as one HTML file: style, scripts and data inlined, nothing loaded from anywhere.

The browser draws the page from the report's JSON with the files of ours/; assets/ holds what others wrote, with its
licences. Names are the user's: they reach the document as text only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files


STYLES = ("base.css", "sections.css", "graph.css", "print.css")
VENDORED = ("cytoscape", "dagre")
# One scope for all of them, in this order.
SCRIPTS = (
    "dom.js",
    "summary.js",
    "timeline.js",
    "curve.js",
    "memory.js",
    "owners.js",
    "tree.js",
    "layout.js",
    "detail.js",
    "opening.js",
    "graph.js",
    "look.js",
    "panel.js",
    "search.js",
    "tables.js",
    "align.js",
    "sides.js",
    "notes.js",
    "target.js",
    "print.js",
    "main.js",
)
HERE = files("gradsync_fx.inspection.page")


def to_html(report_json: str) -> str:
    """One self-contained page for the text that `Report.to_json` returns."""
    data = json.loads(report_json, parse_constant=lambda _: None)  # NaN is no JSON to a browser
    ours = "\n".join(_read("ours", name) for name in SCRIPTS)
    scripts = {
        "theme": _read("ours", "theme.js"),
        "vendored": "\n".join(map(_vendored, VENDORED)),
        "ours": f'(() => {{\n"use strict";\n{ours}\n}})();\n',
    }
    parts = {
        "title": html.escape(str(data["step"])),
        "policy": _policy(tuple(scripts.values())),
        "styles": "\n".join(_read("ours", name) for name in STYLES),
        "data": _embedded(data),
        **scripts,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("ours", "page.html"))


def _read(folder: str, name: str) -> str:
    return (HERE / folder / name).read_text(encoding="utf-8")


def _vendored(name: str) -> str:
    """The library under its licence; without the line that makes a browser ask for its source map."""
    code = re.sub(r"(?m)^//# sourceMappingURL=.*$", "", _read("assets", f"{name}.min.js"))
    return f"/*\n{_read('assets', f'{name}.LICENSE.txt').strip()}\n*/\n{code}"


def _embedded(data: object) -> str:
    """JSON in which no name can end the script element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: tuple[str, ...]) -> str:
    """Content security policy: these scripts and no other, and no request to anywhere."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
