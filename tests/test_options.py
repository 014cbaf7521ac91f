"""Options: defaults as documented, and refusals that say what is legal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsync_fx
from gradsync_fx import OptionError
from gradsync_fx.options import Options, check_steps


def test_defaults() -> None:
    options = Options.of({})
    assert options.gradient_accumulation_steps == 1
    assert options.reduction == "mean"
    assert options.bucket_cap_mb == 25.0
    assert options.bucket_bytes == 25 * 1024 * 1024
    assert options.broadcast_buffers == "window_start"
    assert options.backend == "inductor"
    assert options.sync_each_batch is False
    for name in (
        "process_group",
        "accumulator_dtype",
        "reduce_dtype",
        "mode",
        "dynamic",
        "options",
    ):
        assert getattr(options, name) is None


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "4", None])
def test_k_is_an_integer_of_at_least_one(k: Any) -> None:
    with pytest.raises(OptionError, match="gradient_accumulation_steps") as caught:
        check_steps(k)
    assert repr(k) in caught.value.seen
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", "average"), ("broadcast_buffers", True), ("sync_each_batch", 1),
        ("bucket_cap_mb", 0), ("bucket_cap_mb", float("nan")), ("bucket_cap_mb", "25"),
        ("accumulator_dtype", "float32"), ("reduce_dtype", torch.int32), ("backend", 3),
        ("mode", "fastest"), ("mode", 3), ("dynamic", "yes"), ("options", ["trace.enabled"]),
    ],
)  # fmt: skip
def test_illegal_values(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        Options.of({name: value})
    assert repr(value) in caught.value.seen
    assert caught.value.wanted
    assert caught.value.fix


def test_an_unknown_name_lists_the_legal_ones() -> None:
    with pytest.raises(OptionError, match="did you mean 'bucket_cap_mb'") as caught:
        Options.of({"bucket_cap": 1})
    assert "gradient_accumulation_steps" in caught.value.wanted


def test_options_are_a_value() -> None:
    options = Options(gradient_accumulation_steps=2)
    assert options.with_steps(3).gradient_accumulation_steps == 3
    assert options.gradient_accumulation_steps == 2
    with pytest.raises(AttributeError):
        options.mode = "max-autotune"  # type: ignore[misc]


@pytest.mark.parametrize(("name", "advised"), [("inductr", "inductor"), ("aot-eager", "aot_eager")])
def test_a_backend_that_torch_does_not_know(name: str, advised: str) -> None:
    with pytest.raises(OptionError, match="argument 'backend'") as caught:
        gradsync_fx.optimize(print, backend=name)
    assert repr(name) in caught.value.seen
    assert "aot_eager" in caught.value.wanted
    assert caught.value.fix == f"did you mean {advised!r}?"
    assert Options(backend=advised).backend == advised


def test_this_package_lowers_no_programs() -> None:
    with pytest.raises(OptionError, match="argument 'backend'") as caught:
        gradsync_fx.optimize(print, backend="gradsync")
    assert "this package" in caught.value.seen
    assert "inductor" in caught.value.fix
    assert Options().backend == "inductor"


def test_every_backend_of_torch_is_taken() -> None:
    for name in torch.compiler.list_backends():
        if name != "gradsync":
            Options(backend=name)


def test_modes_of_torch_are_taken() -> None:
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        Options(mode=mode)
    with pytest.raises(OptionError, match="argument 'mode'") as caught:
        Options(mode="max-autotone")
    assert "'max-autotune'" in caught.value.wanted


def other(module: Any, inputs: Any) -> Any:
    return module


@pytest.mark.parametrize("backend", ["aot_eager", "eager", other])
@pytest.mark.parametrize(
    "given", [{"mode": "max-autotune"}, {"options": {"fallback_random": True}}]
)
def test_what_only_inductor_reads_is_refused_beside_another(
    backend: Any, given: dict[str, Any]
) -> None:
    (name,) = given
    with pytest.raises(OptionError) as caught:
        Options(backend=backend, **given)
    assert caught.value.culprit == f"arguments 'backend' and {name!r}"
    assert repr(given[name]) in caught.value.seen
    # Either of them left out:
    Options(backend=backend)
    Options(**given)


def test_nothing_given_is_no_setting() -> None:
    assert Options(backend="eager", mode="default", options={}).options == {}


def test_a_setting_that_inductor_does_not_have() -> None:
    with pytest.raises(OptionError, match="argument 'options'") as caught:
        Options(options={"fallback_randon": True})
    assert caught.value.fix == "did you mean 'fallback_random'?"
    Options(options={"fallback_random": True})
    Options(options={"fallback-random": True})  # as torch.compile takes it
    with pytest.raises(OptionError) as none_near:
        Options(options={"qqqqqq": 1})
    assert none_near.value.fix == "leave it out"
