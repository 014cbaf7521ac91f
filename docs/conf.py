"""The site: README.md, the pages beside this file, and the API from the docstrings (make docs).

Its source is the root of the repository, so that a link is the same there as where the files are read as they are.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import gradsync_fx


project = "gradsync_fx"
author = "the gradsync_fx authors"
release = version = gradsync_fx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/contents"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "examples/benchmarks/RESULTS.md"]
exclude_patterns = [".*", "build", "tests", "gradsync_fx"]  # not to be searched
html_theme = "furo"
html_title = f"gradsync_fx {version}"
html_css_files = ["site.css"]
html_static_path = ["site"]
html_extra_path = ["front"]  # the folder itself leads to README
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "tango", "github-dark"
toc_object_entries_show_parents = "hide"

# Links between pages are checked, anchors too: headings have the names that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # in signatures: torch's pages are not at hand

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}

_FIELD = re.compile(r"^([a-z_][^:]*): (.*)$")  # `name: what`, `name (default): what`


def from_house_style(lines: list[str]) -> list[str]:
    """Docstrings of this package as reStructuredText.

    A block of `name: what it is` lines, continued further in, is a list of definitions; a block that is further in is
    code. Names in backticks are code.
    """
    text = textwrap.dedent("\n".join(lines)).strip()
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        rows = block.splitlines()
        if all(row.startswith("    ") for row in rows):
            found += ["::", "", *rows, ""]
        elif _is_fields(rows):
            found += [*_definitions(rows), ""]
        else:
            found += [_inline(" ".join(row.strip() for row in rows)), ""]
    return found


def _is_fields(rows: list[str]) -> bool:
    starts = [row for row in rows if not row.startswith(" ")]
    fields = [_FIELD.match(row) is not None for row in starts]
    return all(fields) and (len(rows) > len(starts) or len(starts) > 1)


def _definitions(rows: list[str]) -> list[str]:
    found: list[str] = []
    for row in rows:
        field = None if row.startswith(" ") else _FIELD.match(row)
        if field is not None:
            found += [f"``{field[1]}``", f"    {_inline(field[2])}"]
        else:
            found.append(f"    {_inline(row.strip())}")
    return found


def _inline(text: str) -> str:
    """Backticks, single or double, as literals; outside of them nothing is markup."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    return "".join(
        f"``{part.strip('`')}``" if part[:1] == "`" else re.sub(r"([*_|`])", r"\\\1", part)
        for part in parts
    )


def _docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = from_house_style(lines)


def setup(app: Any) -> None:
    """For Sphinx."""
    app.connect("autodoc-process-docstring", _docstring)
