"""The site of README.md and docs/ builds without a warning: every link leads somewhere, every page is reached."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import gradsync_fx
from tests.pages import PAGES, README, ROOT


SOURCES = ("README.md", "CHANGELOG.md", "docs", "examples/benchmarks/RESULTS.md")


def build(root: Path, out: Path, builder: str = "html") -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    return subprocess.run(
        [
            sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder,
            "-c", "docs", "-d", str(out.with_name(f"{out.name}-doctrees")), ".", str(out),
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    ended = build(ROOT, out)
    assert ended.returncode == 0, ended.stderr
    return out


class _Page(HTMLParser):
    """What a page leads to, and the places in it that a link may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" and value:
                self.places.add(value)


def dead_links(site: Path) -> list[str]:
    """Links of the built pages to files or places that are not there; other sites are not asked."""
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            parts = urlsplit(link)
            place = parts.fragment  # none is the top of the page
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            if not target.is_file() or (place and known is not None and place not in known.places):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_no_link_of_the_built_site_is_dead(site: Path) -> None:
    assert (site / "README.html").is_file()
    assert dead_links(site) == []


def test_the_folder_leads_to_the_first_page(site: Path) -> None:
    assert "README.html" in (site / "index.html").read_text()


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w.]+\.md)", README.read_text()))
    pages = {page.name for page in PAGES if page != README}
    assert linked == pages - {"contents.md", "api.md"}  # which are of the site alone


def test_every_public_name_is_documented(site: Path) -> None:
    places = _Page((site / "docs" / "api.html").read_text()).places
    assert {f"gradsync_fx.{name}" for name in gradsync_fx.__all__} <= places


# What is planted, and the word that the complaint has to name.
PLANTED = {
    "[a page](docs/nowhere.md)": "nowhere.md",
    "[a place](docs/loop.md#no-such-place)": "no-such-place",
    "[a place on this page](#not-here-either)": "not-here-either",
    "![a picture](docs/nowhere.png)": "nowhere.png",
}


def test_planted_dead_links_fail_the_build(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in SOURCES:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    (root / "docs" / "api.md").write_text("# API\n")  # the docstrings are not what is tried here
    readme = root / "README.md"
    readme.write_text(readme.read_text() + "".join(f"\n{link}\n" for link in PLANTED))
    ended = build(root, tmp_path / "out", "dummy")
    assert ended.returncode != 0
    complaints = ended.stderr.splitlines()
    for word in PLANTED.values():
        assert any("README.md" in line and word in line for line in complaints), ended.stderr
    assert len(PLANTED) == sum("WARNING" in line for line in complaints), ended.stderr
