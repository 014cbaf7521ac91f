"""The command line: what goes to stdout, what to stderr, and with which exit code.

Most tests call it in this process (`--timeout 0`); the limit, and what a factory does to its process, in others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

import gradsync_fx
from gradsync_fx import disk_cache
from gradsync_fx.cli import doctor, outputs
from gradsync_fx.cli.arguments import EXAMPLES
from gradsync_fx.cli.diff import readable_code, to_sides
from gradsync_fx.cli.main import app
from gradsync_fx.cli.problems import Problem, printable
from gradsync_fx.cli.subprocess_job import limited


ROOT = Path(__file__).resolve().parents[2]
STEPS = """
import os
import sys
import time

import torch
import torch.nn.functional as F


def train_step(model, optimizer, x, y, scale=1.0):
    loss = scale * F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def no_optimizer(model, optimizer, x, y):
    return F.cross_entropy(model(x), y)


def wrong_shape(model, optimizer, x, y):
    return train_step(model, optimizer, x[:, 1:], y)


def arguments():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 8), torch.zeros(4).long()


def good():
    return train_step, arguments()


def with_kwargs():
    return train_step, arguments(), {"scale": 2.0}


def loud():
    print("a factory speaks")
    os.write(1, b"below Python\\n")
    return good()


def raising():
    raise ValueError("no [red]data[/red] \\x1b[31m here")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def mute():
    raise Mute


def leaving():
    sys.exit(0)


def needs(path):
    return good()


def not_a_tuple():
    return train_step


def no_step():
    return 5, arguments()


def bare_argument():
    return train_step, torch.zeros(2)


def odd_kwargs():
    return train_step, arguments(), {"mode": "x"}


def refused():
    return no_optimizer, arguments()


def failing():
    return wrong_shape, arguments()


def hanging():
    print("a hanging factory speaks")
    while True:
        time.sleep(0.01)


def holding():
    return 9 ** 9 ** 9  # in C, with the interpreter's lock


def dying():
    os._exit(7)


NUMBER = 3
"""
SECONDS = 3.0


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "steps.py"
    path.write_text(STEPS)
    return path


def line(text: str) -> int:
    """Where the file has it."""
    return STEPS[: STEPS.index(text)].count("\n") + 1


def invoke(*arguments: Any, width: int = 300) -> Result:
    """In this process. No traceback may be seen."""
    options = ["--timeout", "0"] if arguments[0] in ("inspect", "diff") else []
    environment = {"COLUMNS": str(width), "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [*map(str, arguments), *options], env=environment)
    assert "Traceback" not in result.output
    if result.exception is not None:
        assert isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as `python -m gradsync_fx`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "gradsync_fx", *arguments],
        env=environment,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        **options,
    )


@pytest.fixture(scope="module")
def report(steps: Path) -> gradsync_fx.inspection.report.Report:
    """What the command line has to tell: `good` on 8 ranks, k = 4."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(STEPS, str(steps), "exec"), names)
    step, args = names["good"]()
    return gradsync_fx.explain(step, *args, gradient_accumulation_steps=4, world_size=8)


WINDOW = ("-k", "4", "--world-size", "8")


# inspect


def test_prints_what_the_report_prints(steps: Path, report: Any) -> None:
    result = invoke("inspect", f"{steps}:good", *WINDOW)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip() == str(report)
    assert result.stderr == ""


def test_json_is_the_report(steps: Path, report: Any) -> None:
    result = invoke("inspect", f"{steps}:good", *WINDOW, "--json", "-")
    assert result.exit_code == 0
    found, wanted = json.loads(result.stdout), json.loads(report.to_json())
    for times in (found, wanted):
        times.pop("passes")  # with the milliseconds that each took
    assert found == wanted
    assert (found["collectives_before"], found["collectives_after"]) == (4, 1)
    assert (found["k"], found["world_size"], found["simulated"]) == (4, 8, True)


def test_files(steps: Path, tmp_path: Path, report: Any) -> None:
    data, graph, page = (tmp_path / name for name in ("r.json", "r.dot", "r.html"))
    more = ["--html", page] if hasattr(report, "to_html") else []
    result = invoke("inspect", f"{steps}:good", *WINDOW, "--json", data, "--dot", graph, *more)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip() == str(report)
    assert json.loads(data.read_text())["step"] == "train_step"
    assert graph.read_text() == report.to_dot()
    assert f"wrote {data}" in result.stderr
    assert not more or "<html" in page.read_text()


def test_options_reach_the_report(steps: Path) -> None:
    result = invoke(
        "inspect", f"{steps}:with_kwargs", *WINDOW, "--json", "-", "--reduction", "sum",
        "--sync-each-batch", "--reduce-dtype", "bfloat16", "--bucket-cap-mb", "0.00001",
        "--hardware", "h100-400g", "--latency", "0.5",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["scale"]["reduction"] == "sum"
    assert found["scale"]["wire_dtypes"] == ["bfloat16"]
    assert found["collectives_after"] == found["collectives_before"] == 4
    machine = found["predicted"]["hardware"]
    assert (machine["name"], machine["latency"]) == ("h100-400g, changed", 0.5)
    assert machine["bandwidth"] == 4.5e10


def test_dotted_module(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(steps.parent)
    before = list(sys.path), list(sys.argv)
    result = invoke("inspect", "steps:good", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["k"] == 1
    assert (sys.path, sys.argv) == before
    del sys.modules["steps"]


# What went wrong


@pytest.mark.parametrize(
    ("factory", "code", "says"),
    [
        (
            "raising",
            3,
            ("ValueError: no [red]data[/red] \\x1b[31m here", line('raise ValueError("')),
        ),
        ("mute", 3, ("Mute: its text cannot be had (RuntimeError)", line("raise Mute"))),
        ("leaving", 3, ("SystemExit: 0", line("sys.exit(0)"))),
        ("needs", 3, ("TypeError: needs() missing 1 required", line("def needs"))),
        ("not_a_tuple", 3, ("returned a function", line("def not_a_tuple"))),
        ("no_step", 3, ("returned a int as train_step", line("def no_step"))),
        ("bare_argument", 3, ("returned args as a Tensor", line("def bare_argument"))),
        ("odd_kwargs", 3, ("named like options (mode)", line("def odd_kwargs"))),
        ("refused", 1, ("it never calls backward", None)),
        ("NUMBER", 2, ("is a int, not a function", None)),
        ("god", 2, ("did you mean good?", None)),
        ("[red]x[/red]", 2, (":[red]x[/red]: the file has no such function", None)),
        ("\x1b[31mx", 2, (":\\x1b[31mx: the file has no such function", None)),
    ],
)
def test_factories(steps: Path, factory: str, code: int, says: tuple[str, int | None]) -> None:
    result = invoke("inspect", f"{steps}:{factory}", *WINDOW)
    text, number = says
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert text in result.stderr
    assert number is None or f"steps.py:{number}: " in result.stderr
    assert "what to do: " in result.stderr
    assert "\x1b" not in result.stderr


def test_a_step_that_raises(steps: Path) -> None:
    result = invoke("inspect", f"{steps}:failing", *WINDOW)
    assert result.exit_code in (1, 3), result.output
    assert "steps.py" in result.stderr


def test_traceback_on_demand(steps: Path) -> None:
    environment = {"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}
    arguments = ["inspect", f"{steps}:raising", "--timeout", "0", "--traceback"]
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert "in raising" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py:gpt"], "there is no such file"),
        (["nowhere.at.all:gpt"], "there is no module 'nowhere'"),
        (["just_a_name"], "names no factory"),
        (["[bold]a[/bold].py:f"], "[bold]a[/bold].py: there is no such file"),
        (["{steps}:good", "-k", "0"], "0 of type int"),
        (["{steps}:good", "-k", "four"], "'four' of type str"),
        (["{steps}:good", "--world-size", "0"], "--world-size"),
        (["{steps}:good", "--reduction", "[b]max"], "'[b]max' of type str"),
        (["{steps}:good", "--reduce-dtype", "int8"], "torch.int8 of type dtype"),
        (["{steps}:good", "--reduce-dtype", "nn"], "None or a floating torch.dtype"),
        (["{steps}:good", "--hardware", "abacus"], "no such preset"),
        (["{steps}:good", "--flops", "nan"], "--flops: nan"),
        (["{steps}:good", "--bandwidth", "0"], "a number above 0"),
        (["{steps}:good", "--html", "-"], "a page is not for a terminal"),
        (["{steps}:good", "--json", "-", "--dot", "-"], "two outputs to stdout"),
        (["{steps}:good", "--nothing"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_wrong_use(steps: Path, arguments: list[str], says: str) -> None:
    result = invoke("inspect", *(a.replace("{steps}", str(steps)) for a in arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert says in result.stderr


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    for name, text, says in (
        ("syntax.py", "x = 1\ndef broken(:\n", "syntax.py:2: SyntaxError"),
        ("imports.py", "\nimport no_such_module\n", "imports.py:2: ModuleNotFoundError"),
    ):
        (tmp_path / name).write_text(text)
        result = invoke("inspect", f"{tmp_path / name}:gpt")
        assert result.exit_code == 3
        assert says in result.stderr


@pytest.mark.parametrize("option", ["--json", "--dot", "--html"])
def test_outputs_that_cannot_be_written_are_found_before_the_work(
    steps: Path, tmp_path: Path, option: str
) -> None:
    for path, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "r", "there is no folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        result = invoke("inspect", f"{steps}:raising", option, path)
        assert result.exit_code == 4, result.output
        assert says in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk of Linux")
@pytest.mark.parametrize("option", ["--json", "--dot", "--html"])
def test_full_disk(steps: Path, option: str) -> None:
    result = invoke("inspect", f"{steps}:good", option, "/dev/full")
    assert result.exit_code == 4
    assert "No space left" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux alone")
def test_a_file_with_a_name_that_no_encoding_has(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/<b>\xff.py"))
    path.write_text(STEPS)
    files = [tmp_path / f"report.{kind}" for kind in ("json", "dot", "html")]
    asked = [
        x
        for kind, file in zip(("json", "dot", "html"), files, strict=True)
        for x in (f"--{kind}", file)
    ]
    # In a process of its own: behind other tests, a trace in this one was seen to fail when it wrote the name out.
    result = run("inspect", f"{path}:good", *WINDOW, *map(str, asked))
    assert result.returncode == 0, result.stderr
    for file in files:
        assert "udcff.py" in file.read_text(encoding="utf-8")
    shown = run("inspect", f"{path}:good", *WINDOW)
    assert shown.returncode == 0, shown.stderr
    assert "udcff.py" in shown.stdout


# diff


def test_diff(steps: Path, report: Any) -> None:
    narrow = invoke("diff", f"{steps}:good", *WINDOW, width=80)
    assert narrow.exit_code == 0, narrow.output
    assert max(map(len, narrow.stdout.splitlines())) <= 80
    unified = invoke("diff", f"{steps}:good", *WINDOW, "--unified")
    assert unified.stdout.split() == narrow.stdout.split()
    lines = narrow.stdout.splitlines()
    assert lines[:2] == ["--- accumulate", "+++ boundary"]
    text = unified.stdout
    assert re.search(r"^\+.*all_reduce", text, re.MULTILINE)
    assert not re.search(r"^[- ].*all_reduce", text, re.MULTILINE)
    assert "parameter_weight" in narrow.stdout
    wide = invoke("diff", f"{steps}:good", *WINDOW, width=200)
    assert wide.stdout.splitlines()[0].split() == ["accumulate", "boundary"]
    assert max(map(len, wide.stdout.splitlines())) <= 200


def test_diff_as_json(steps: Path, report: Any) -> None:
    result = invoke("diff", f"{steps}:good", *WINDOW, "--json", "-")
    found = json.loads(result.stdout)
    assert found["programs"] == {p.name: p.code for p in report.programs}
    assert "all_reduce" not in found["programs"]["accumulate"]


def test_diff_of_one_program(steps: Path) -> None:
    result = invoke("diff", f"{steps}:good", "-k", "1")
    assert result.exit_code == 2
    assert "one program only" in result.stderr


def test_sides_fit_their_columns(report: Any) -> None:
    for width in (80, 160, 300):
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(to_sides(report, width, unified=False))
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("--- ") is (width == 80)


def test_readable() -> None:
    code = "\n\ndef forward(self, a, arg0_1):\n    b = torch.ops.aten.t.default(arg0_1);  arg0_1 = a = None\n"
    assert readable_code(code, {"arg0_1": "parameter_w"}) == (
        "def forward(1 parameter, 1 other input):\n    b = aten.t.default(parameter_w)"
    )


# doctor


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("doctor", "--json", "-")
    found = json.loads(result.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert result.exit_code == (0 if found["ok"] else 1)
    assert checks["torch"]["status"] == "ok"
    assert torch.__version__ in checks["torch"]["detail"]
    assert {"python", "C++ compiler", "Python.h", "torch.distributed", "cache"} <= set(checks)
    assert all(check["fix"] for check in found["checks"] if check["status"] != "ok")


def test_doctor_finds_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "get_cpp_compiler", lambda: "no-such-compiler")
    monkeypatch.setattr(doctor, "inductor_cache_dir", lambda: str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor, "torch_version", lambda: (1, 9))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor.dist, "is_gloo_available", lambda: 1 / 0)
    result = invoke("doctor", "--json", "-")
    assert result.exit_code == 1
    status = {c["name"]: c["status"] for c in json.loads(result.stdout)["checks"]}
    for name in ("torch", "C++ compiler", "Python.h", "cache"):
        assert status[name] == "fail", name
    assert status["distributed"] == "warn"  # the check itself failed
    table = invoke("doctor", width=80)
    assert table.exit_code == 1
    assert "what to do: " in table.stdout


def test_doctor_gives_up_on_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr(doctor, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "get_cpp_compiler", lambda: str(slow))
    (check,) = doctor._compiler()
    assert check.status == "fail"
    assert "within 0.2 s" in check.detail


# cache


def test_cache_is_shown_and_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    disk_cache.write_entry(disk_cache.key_of("x"), [0])
    shown = invoke("cache")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("1 entries, 0.0 MiB, at most 256\n")
    assert str(tmp_path) in shown.stdout.replace("\n", "")
    found = json.loads(invoke("cache", "--json", "-").stdout)
    assert (found["entries"], found["deleted"]) == (1, 0)
    assert found["bytes"] > 100
    assert "1 deleted" in invoke("cache", "--clear").stdout
    assert json.loads(invoke("cache", "--json", "-").stdout)["entries"] == 0


# Help, and the whole program


def test_help_has_examples_and_exit_codes() -> None:
    for command in EXAMPLES:
        text = (
            invoke(command, "--help").stdout if command in ("doctor", "cache") else _help(command)
        )
        for example in EXAMPLES[command]:
            assert example in text
        assert "2  wrong use" in text
    everything = _help()
    assert "--install-completion" in everything
    assert all(example in everything for lines in EXAMPLES.values() for example in lines)


def _help(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    return result.stdout


def test_examples_name_options_that_exist() -> None:
    for command, lines in EXAMPLES.items():
        text = _help(command)
        for example in lines:
            words = example.split(" | ")[0].split()
            assert words[:2] == ["gradsync-fx", command]
            assert all(w.split("=")[0] in text for w in words if w.startswith("-") and w != "-")


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        f"gradsync_fx {gradsync_fx.__version__} (torch {torch.__version__}"
    )


def test_plain() -> None:
    assert printable("a\x1b[2Jé\n\x00") == "a\\x1b[2Jé\n\\x00"


def test_stdout_is_for_the_result_alone(steps: Path) -> None:
    result = run("inspect", f"{steps}:loud", *WINDOW, "--json", "-")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["k"] == 4
    assert "a factory speaks" in result.stderr
    assert "below Python" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="children are forks on Linux alone")
@pytest.mark.parametrize("factory", ["hanging", "holding"])
def test_a_job_that_hangs(steps: Path, factory: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(STEPS, str(steps), "exec"), names)
    problem = _limited(lambda tell: names[factory](), steps)
    body = {"hanging": "time.sleep(0.01)", "holding": "9 ** 9"}[factory]
    assert problem.code == 3
    assert problem.culprit == f"{steps}:{line(body)}"
    assert problem.seen == "not done within 0.3 s, while starting; ended"


@pytest.mark.skipif(sys.platform != "linux", reason="children are forks on Linux alone")
def test_a_job_that_dies(steps: Path) -> None:
    def dies(tell: Any) -> None:
        tell("dying")
        os._exit(7)

    def is_killed(tell: Any) -> None:
        os.kill(os.getpid(), 9)

    assert _limited(dies, steps).seen.endswith("with exit status 7, while dying")
    assert "killed by SIGKILL" in _limited(is_killed, steps).seen


def _limited(job: Any, steps: Path) -> Problem:
    with pytest.raises(Problem) as caught:
        limited(job, 0.3, "culprit", str(steps), lambda text: None, lambda text: None)
    return caught.value


@pytest.mark.skipif(sys.platform != "linux", reason="children are forks on Linux alone")
def test_the_limit_of_the_command(steps: Path) -> None:
    environment = {"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}
    arguments = ["inspect", f"{steps}:hanging", "--timeout", "1"]
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert f"steps.py:{line('time.sleep(0.01)')}: not done within 1 s" in result.stderr
    assert "while calling hanging" in result.stderr
    assert "a hanging factory speaks" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk of Linux")
def test_stdout_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(Problem) as caught:
            outputs.show(Console(), "a table")
        monkeypatch.undo()
    assert caught.value.code == 4
    assert caught.value.seen == "No space left on device"


def test_a_reader_that_has_seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """`| head`: no complaint."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(typer.Exit) as caught:
            outputs.out("a table\n")
        monkeypatch.undo()
    assert caught.value.exit_code == 0
