"""The page of a report, in headless Chromium: complete, quiet, safe with hostile names, and usable at any width."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.inspection.page import to_html


HOSTILE = "<script>alert(1)</script>"
HOSTILE_LINE = "</script><img src=x onerror=alert(1)>.py:7"
LIT = "return document.querySelector('.canvas').dataset.lit.split(' ').filter(Boolean)"
PRESS = "[...document.querySelectorAll('.buttons button')].find(b => b.textContent === arguments[0]).click()"
IN_VIEW = "return document.querySelector('.canvas')._cyreg.cy.nodes(arguments[0]).map(n => n.data('name'))"


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def layers() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(8, 16))
    model.add_module(HOSTILE, nn.Linear(16, 16))
    model.add_module("__proto__", nn.Linear(16, 4))
    return model


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """A report of a small step, with all that a page can show."""
    model = layers()
    found = gradsync_fx.explain(
        train_step,
        model,
        torch.optim.AdamW(model.parameters()),
        torch.randn(4, 8),
        torch.randn(4, 4),
        gradient_accumulation_steps=16,
        world_size=8,
    )
    data: dict[str, Any] = json.loads(found.to_json())
    first = data["collectives"][0]
    data["collectives"].append(
        {**first, "bucket": 1, "bytes": first["bytes"] * 3, "nodes": first["nodes"][1:3]}
    )
    data["warnings"] = [f"the loss is divided by 4 at {HOSTILE_LINE}", HOSTILE]
    data["refusals"] = ["declined & <b>kept</b>"]
    data["moved"] = ["print <b>moved</b>"]
    data["unused_parameters"] = ["spare.weight"]
    data["kept"] = [
        {
            "op": "all_gather",
            "line": HOSTILE_LINE,
            "why": "for a metric",
            "node": data["graph"][-1]["name"],
        }
    ]
    data["graph"][-1]["line"] = HOSTILE_LINE
    data["programs"][0].update(compile_seconds=1.5, calls=3, seconds=0.3)
    return data


class Page:
    """A loaded page and what is asked of it."""

    def __init__(self, browser: Chrome, address: str) -> None:
        self.browser, self.address = browser, address

    def load(self, width: int = 1400, theme: str = "light") -> None:
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.browser.get(self.address)

    def run(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(script, *args)

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        found: str = self.run("return document.querySelector(arguments[0]).textContent", selector)
        return found

    def number(self, selector: str) -> int:
        return len(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def open_all_details(self) -> None:
        self.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
        WebDriverWait(self.browser, 10).until(lambda _: self.number("details pre") > 0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium is not None, "these tests need a browser: apt-get install chromium"
    assert driver is not None, "these tests need its driver: apt-get install chromium-driver"
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def closed(
    browser: Chrome, report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Page:
    """The page, written and not loaded."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(to_html(json.dumps(report)), encoding="utf-8")
    return Page(browser, file.as_uri())


@pytest.fixture
def page(closed: Page) -> Page:
    for kind in ("browser", "performance"):
        closed.browser.get_log(kind)
    closed.load()
    return closed


def requested(browser: Chrome) -> list[str]:
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]


def test_loads_without_errors_or_requests(page: Page) -> None:
    page.open_all_details()
    page.one("#collectives-table tbody tr").click()
    assert page.browser.get_log("browser") == []
    assert {url for url in requested(page.browser) if not url.startswith("data:")} == {page.address}


def test_numbers_are_those_of_the_report(page: Page, report: dict[str, Any]) -> None:
    page.open_all_details()
    for name in ("collectives", "bytes"):
        for when in ("before", "after"):
            found = page.one(f'[data-figure="{name}-{when}"]').get_attribute("data-value")
            assert int(found) == report[f"{name}_{when}"], (name, when)
    rows = {
        "#collectives-table": report["collectives"],
        "#programs-table": report["programs"],
        "#parameters-table": report["parameters"],
        "#passes table": report["passes"],
    }
    for selector, expected in rows.items():
        assert page.number(f"{selector} tbody tr") == len(expected), selector
    notes = [
        *report["warnings"],
        *report["moved"],
        *report["refusals"],
        *report["kept"],
        "unused parameters",
    ]
    assert page.number("#notes .note") == len(notes)
    assert page.number(".curve circle.dot") == len(report["predicted"]["speedup"])
    levels = sum(len(p["levels"]) for p in report["memory"]["programs"])
    assert page.number(".memory .level") == levels
    assert f"{len(report['graph'])} nodes" in page.text(".panel")
    shown = page.run(
        "return [...document.querySelectorAll('#graph .legend .number')].map(e => +e.textContent)"
    )
    assert sum(shown) == len(report["graph"])
    assert [p["code"].strip() for p in report["programs"]] == page.run(
        "return [...document.querySelectorAll('details.code pre')].map(e => e.textContent)"
    )


def test_every_node_is_in_the_graph_when_all_is_open(page: Page, report: dict[str, Any]) -> None:
    closed = [name for name in page.run(IN_VIEW, "*") if name]
    page.run(PRESS, "Open all")
    WebDriverWait(page.browser, 20).until(
        lambda _: page.text(".said").startswith("everything open")
    )
    opened = [name for name in page.run(IN_VIEW, "*") if name]
    assert len(closed) < len(opened)
    assert sorted(opened) == sorted(n["name"] for n in report["graph"])


@pytest.fixture
def large(browser: Chrome, report: dict[str, Any], tmp_path: Path) -> Page:
    """A page of 40 modules with 60 nodes each, no two of them alike: opening them takes several slices."""
    node = {**report["graph"][-1], "region": "forward", "parameter": "", "programs": ["boundary"]}
    graph = []
    for i in range(2400):
        module, at = divmod(i, 60)
        inputs = [f"n{i - 1 - (at * 3 + module) % at}"] if at else []
        graph.append({**node, "name": f"n{i}", "module": f"m{module}", "inputs": inputs})
    file = tmp_path / "large.html"
    file.write_text(to_html(json.dumps({**report, "graph": graph})), encoding="utf-8")
    page = Page(browser, file.as_uri())
    page.load()
    return page


@pytest.mark.parametrize("by", ["Stop", "Close all", "search"])
def test_opening_all_can_be_stopped(large: Page, by: str) -> None:
    before = large.run(IN_VIEW, "*")
    assert not any(before)
    # Both in one script: the first click returns with its work undone, and nothing comes between.
    if by == "search":
        search = "const f = document.querySelector('#search'); f.value = 'n777';"
        enter = "f.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }))"
        large.run(f"{PRESS}; {search}; {enter}", "Open all")
        assert set(filter(None, large.run(IN_VIEW, "*"))) == {f"n{i}" for i in range(720, 780)}
        assert large.run(IN_VIEW, ".picked") == ["n777"]
    else:
        large.run(f"{PRESS}; {PRESS.replace('[0]', '[1]')}", "Open all", by)
        assert large.run(IN_VIEW, "*") == before
    large.run(PRESS, "Open all")  # it is no longer called Stop
    WebDriverWait(large.browser, 60).until(
        lambda _: large.text(".said").startswith("everything open")
    )


def test_what_is_drawn_of_a_large_graph_depends_on_the_view(large: Page) -> None:
    large.run(PRESS, "Open all")
    WebDriverWait(large.browser, 60).until(
        lambda _: large.text(".said").startswith("everything open")
    )
    assert len(large.run(IN_VIEW, "*")) < 1000
    large.one("#search").send_keys("n1234", Keys.ENTER)
    assert large.run(IN_VIEW, ".picked") == ["n1234"]
    drawn = set(large.run(IN_VIEW, "*"))
    assert {f"n{i}" for i in range(1200, 1260)} <= drawn
    assert "n0" not in drawn


@pytest.mark.parametrize("name", ["first.weight", f"{HOSTILE}.bias", "__proto__.weight"])
def test_search_finds_a_parameter(page: Page, report: dict[str, Any], name: str) -> None:
    page.one("#search").send_keys(name)
    assert page.text('#search-list [role="option"] span') == name
    page.one("#search").send_keys(Keys.ENTER)
    node = next(n for n in report["graph"] if n["parameter"] == name and n["op"] == "parameter")
    assert page.run(IN_VIEW, ".picked") == [node["name"]]
    assert page.text(".panel h3") == name
    assert ", ".join(map(str, node["shape"])) in page.text(".panel")


def test_the_panel_of_a_parameter_names_its_bucket(page: Page, report: dict[str, Any]) -> None:
    bucket = report["collectives"][-1]  # the report has each parameter in two
    page.one("#search").send_keys("first.weight", Keys.ENTER)
    button = "[...document.querySelectorAll('.panel button')].find(b => b.textContent.startsWith('bucket'))"
    assert page.run(f"return {button}.textContent").startswith(f"bucket {bucket['bucket']},")
    page.run(f"{button}.click()")
    assert page.text(".panel h3") == f"Bucket {bucket['bucket']}"
    assert set(page.run(LIT)) == set(bucket["nodes"]) & {n["name"] for n in report["graph"]}


def test_search_finds_a_line(page: Page, report: dict[str, Any]) -> None:
    node = next(n for n in report["graph"] if n["region"] == "forward")
    file, _, line = node["line"].rpartition(":")
    page.one("#search").send_keys(f"{Path(file).name}:{line}")
    assert page.text("#search-list small").endswith(" nodes")
    assert "found" in page.text('.search [role="status"]')
    page.one("#search").send_keys(Keys.ENTER)
    expected = {n["name"] for n in report["graph"] if n["line"] == node["line"]}
    assert set(page.run(LIT)) == expected
    assert page.one(".panel h3 a").get_attribute("href") == f"vscode://file{file}:{line}"


def test_an_editor_is_asked_for_paths_only(
    browser: Chrome, report: dict[str, Any], tmp_path: Path
) -> None:
    """A line becomes a link where it has a whole path; what a path could mean to an address is written out."""
    lines = {
        "/a b/#x?y.py:3": "vscode://file/a%20b/%23x%3Fy.py:3",
        "C:\\x\\y.py:4": "vscode://file/C:/x/y.py:4",
        "javascript:alert(1).py:5": None,
        "y.py:6": None,
        "/\udcff.py:7": None,
    }
    kept = [{"op": "x", "line": line, "why": "", "node": ""} for line in lines]
    data = {**report, "kept": kept}
    file = tmp_path / "lines.html"
    file.write_text(to_html(json.dumps(data)), encoding="utf-8")
    page = Page(browser, file.as_uri())
    page.load()
    links = "n => n.querySelector('a')?.getAttribute('href') ?? null"
    found = page.run(f"return [...document.querySelectorAll('.note.kept')].map({links})")
    assert found == list(lines.values())


def test_the_two_programs_side_by_side(page: Page, report: dict[str, Any]) -> None:
    page.open_all_details()
    page.run("document.querySelectorAll('.sides .unfold').forEach(b => b.click())")
    same, gone, added = (
        "\n".join(
            page.run(
                f"return [...document.querySelectorAll('.sides pre{kind}')].map(e => e.textContent)"
            )
        )
        for kind in (":not(.right, .gone, .added)", ".gone", ".added")
    )
    assert page.number(".sides pre.twin") == page.number(".sides pre:not(.right, .gone, .added)")
    code = {p["name"]: p["code"].strip().splitlines() for p in report["programs"]}
    assert len(f"{same}\n{gone}".splitlines()) == len(code["boundary"])
    assert len(f"{same}\n{added}".splitlines()) == len(code["accumulate"])
    for op in ("all_reduce", "copy_.default(first.weight,"):
        assert op in gone
        assert op not in same + added
    assert "aten.add.Tensor(accumulator[first.weight]," in same


def test_what_accumulate_leaves_out_is_greyed(page: Page) -> None:
    page.run(PRESS, "Grey out what accumulate leaves out")
    gone = set(
        page.run(
            "return document.querySelector('.canvas')._cyreg.cy.nodes('.gone').map(n => n.data('region'))"
        )
    )
    assert {"optimizer", "gradient sync"} <= gone
    assert not gone & {"input", "forward", "backward"}


@pytest.mark.parametrize("by_key", [False, True])
def test_a_row_of_a_collective_lights_its_nodes(
    page: Page, report: dict[str, Any], by_key: bool
) -> None:
    expected = set(report["collectives"][0]["nodes"]) & {n["name"] for n in report["graph"]}
    row = page.one("#collectives-table tbody tr")
    if by_key:
        row.send_keys(Keys.ENTER)
    else:
        row.click()
    assert set(page.run(LIT)) == expected != set()
    assert set(page.run(IN_VIEW, ".lit")) == expected
    top = page.run("return document.querySelector('.desk').getBoundingClientRect().top")
    assert 0 <= top < 500
    assert f"{len(expected)} nodes lit" in page.text(".said")


def test_collectives_sort_and_filter(page: Page, report: dict[str, Any]) -> None:
    first = "return +document.querySelector('#collectives-table tbody th').textContent"
    page.run("[...document.querySelectorAll('#collectives-table thead button')][1].click()")
    largest = max(report["collectives"], key=lambda c: c["bytes"])["bucket"]
    assert page.run(first) == largest
    assert page.one('#collectives-table [aria-sort="descending"]').text.startswith("Size")
    page.run("[...document.querySelectorAll('#collectives-table thead button')][1].click()")
    assert page.run(first) != largest
    page.one("#parameters summary").click()
    WebDriverWait(page.browser, 5).until(lambda _: page.number("#parameters-table"))
    page.one("#parameters .tools input").send_keys("first")
    assert page.number("#parameters-table tbody tr") == 2


def test_hostile_names_are_text(page: Page, report: dict[str, Any]) -> None:
    page.open_all_details()
    assert page.browser.title.startswith("train_step")
    assert page.number("script") == 4  # theme, data, libraries, ours
    assert page.number("img") == page.number("b") == 0
    assert [
        e.text for e in page.browser.find_elements(By.CSS_SELECTOR, ".note.warning div")
    ] == report["warnings"]
    assert HOSTILE in page.text("#parameters-table")
    assert page.browser.get_log("browser") == []


def test_hostile_names_of_a_step_and_its_file_are_text(browser: Chrome, tmp_path: Path) -> None:
    """Not put into a report: a function and a file that are really called so."""
    where = f"/home/{HOSTILE_LINE.removesuffix(':7')}"
    names: dict[str, Any] = {"nn": nn}
    body = inspect.getsource(train_step).partition("\n")[2]
    source = f"def train_step(model, optimizer, x, y):\n{body}"
    exec(compile(source, where, "exec"), names)
    names["train_step"].__name__ = names["train_step"].__qualname__ = HOSTILE
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(4, 8), torch.randn(4, 4)
    found = gradsync_fx.explain(names["train_step"], model, optimizer, *data, world_size=2)
    file = tmp_path / f"{HOSTILE.replace('/', '_')}.html"
    file.write_text(found.to_html(), encoding="utf-8")
    browser.get_log("browser")
    page = Page(browser, file.as_uri())
    page.load()
    page.open_all_details()
    assert browser.title.startswith(HOSTILE)
    assert page.number("script") == 4
    assert page.number("img") == 0
    assert where in page.text("body")
    assert browser.get_log("browser") == []


def test_the_data_ends_no_script_element() -> None:
    text = to_html(
        json.dumps({"step": f"{HOSTILE}{{{{data}}}}", "x": ["</script>", "<!--", "&", "\u2028"]})
    )
    data = text.split('<script type="application/json" id="report">')[1].split("</script>")[0]
    assert json.loads(data)["x"] == ["</script>", "<!--", "&", "\u2028"]
    assert not set("<>&") & set(data)
    assert HOSTILE not in text


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 2000])
def test_any_width_in_both_themes(closed: Page, width: int, theme: str) -> None:
    page = closed
    page.load(width, theme)
    page.open_all_details()
    page.one("#collectives-table tbody tr").click()
    root = "document.documentElement"
    assert page.run("return innerWidth") == width
    assert page.run(f"return {root}.scrollWidth - {root}.clientWidth") == 0
    colours = page.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    back, ink = (
        sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(","))) for c in colours
    )
    assert (back > ink) == (theme == "light")
    assert page.browser.get_log("browser") == []


def test_the_theme_is_chosen_and_remembered(page: Page) -> None:
    dark = "return document.documentElement.dataset.theme"
    page.one("#theme-toggle").click()
    assert page.run(dark) == "dark"
    page.load()
    assert page.run(dark) == "dark"
    page.one("#theme-toggle").click()
    assert page.run(dark) == "light"
    page.run("localStorage.clear()")


def test_keys_reach_everything(page: Page) -> None:
    page.run("document.activeElement.blur()")
    page.one("body").send_keys(Keys.TAB)
    assert page.run("return document.activeElement.className") == "skip"
    reached = (
        "return [...document.querySelectorAll('a[href], button, input, summary, [tabindex=\"0\"]')]"
    )
    unnamed = ".filter(e => !(e.textContent.trim() || e.ariaLabel)).map(e => e.outerHTML)"
    assert page.run(reached + unnamed) == []
    page.one(".frame").send_keys("+")
    before = page.run("return document.querySelector('.canvas')._cyreg.cy.zoom()")
    page.one(".frame").send_keys("+")
    assert page.run("return document.querySelector('.canvas')._cyreg.cy.zoom()") > before
    button = page.one(".panel .links button")
    button.send_keys(Keys.ENTER)
    assert page.text(".panel .actions button") in ("Open", "Close")


def roles(page: Page) -> list[tuple[str, str]]:
    """What a screen reader is told: role and name of everything on the page."""
    page.browser.execute_cdp_cmd("Accessibility.enable", {})
    nodes = page.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    told = [n for n in nodes if not n.get("ignored")]
    return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in told]


def test_a_screen_reader_is_told_names_and_results(page: Page) -> None:
    page.open_all_details()
    named = {
        "application", "button", "combobox", "complementary", "heading", "image", "link", "navigation", "region",
        "searchbox", "table", "toolbar",
    }  # fmt: skip
    found = roles(page)
    assert named <= {role for role, _ in found}
    assert [role for role, name in found if role in named and not name] == []
    assert "Canvas" not in {role for role, _ in found}
    page.one("#search").send_keys("first")
    told = page.text('.search [role="status"]')
    page.one("#search").send_keys(" nothing of that kind")
    assert told.endswith("found")
    assert page.text('.search [role="status"]') == "nothing of that name"


def test_tables_fit_a_phone_and_are_read_as_tables(closed: Page) -> None:
    rows = []
    for width in (1400, 360):
        closed.load(width)
        closed.open_all_details()
        in_tables = {"table", "row", "columnheader", "rowheader", "cell"}
        rows.append(sorted(role for role, _ in roles(closed) if role in in_tables))
    assert rows[0] == rows[1] != []
    wider = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert closed.run(f"return {wider}.map(e => e.ariaLabel)") == []
    title = "getComputedStyle(document.querySelector('#parameters-table td'), '::before').content"
    assert closed.run(f"return {title}") == '"Shape"'


def test_paper_is_light_open_and_as_it_was_afterwards(closed: Page) -> None:
    closed.load(theme="dark")
    look = """() => ({
        theme: document.documentElement.dataset.theme ?? "",
        open: document.querySelectorAll("details[open]").length,
        rows: document.querySelectorAll("#parameters-table tbody tr").length,
        pictures: [...document.querySelectorAll("img")].filter(i => i.src.startsWith("data:image/png")).length,
    })"""
    before = closed.run(
        f"const look = {look}; addEventListener('beforeprint', () => {{ window.seen = look() }}); return look()"
    )
    closed.browser.execute_cdp_cmd("Page.printToPDF", {})
    seen = closed.run("return window.seen")
    assert seen == {"theme": "light", "open": seen["open"], "rows": 6, "pictures": 1}
    assert seen["open"] == closed.number("details:not(.code, #sides)")
    assert closed.run(f"return ({look})()") == {**before, "rows": 6}
    assert closed.browser.get_log("browser") == []
