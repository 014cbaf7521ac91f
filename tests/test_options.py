"""Options: defaults as documented, and refusals that say what is legal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
