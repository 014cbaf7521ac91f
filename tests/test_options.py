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


def test_updates_are_not_shared_out_in_eager_windows() -> None:
    with pytest.raises(OptionError, match="'shard_optimizer' and 'on_unsupported'") as caught:
        Options.of({"shard_optimizer": True, "on_unsupported": "eager"})
    assert "leave on_unsupported out and keep shard_optimizer" in caught.value.fix
    Options.of({"shard_optimizer": True})
    with pytest.raises(OptionError, match="shard_optimizer"):
        Options.of({"shard_optimizer": 1})


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", ["mean"]),
        ("mode", []),
        ("mode", {}),
        ("bucket_cap_mb", 10**400),
        ("bucket_cap_mb", float("inf")),
        ("bucket_cap_mb", True),
        ("rank_timeout", 10**400),
        ("rank_timeout", True),
        ("accumulator_dtype", torch.float8_e4m3fn),
        ("reduce_dtype", torch.float8_e5m2),
        ("without", None),
        ("without", 3),
        ("without", [[]]),
        ("process_group", "world"),
        ("process_group", 3),
        ("process_group", torch.distributed.GroupMember.NON_GROUP_MEMBER),
        ("options", {"max_autotune": "yes"}),
        ("options", {1: 2}),
    ],
)
def test_values_of_another_type_are_refused_at_once(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"argument '{name}'") as caught:
        gradsync_fx.optimize(print, **{name: value})  # type: ignore[call-overload]
    assert caught.value.wanted
    assert gradsync_fx.optimize(print)


def test_numbers_at_their_ends() -> None:
    assert Options(bucket_cap_mb=1e308).bucket_bytes > 0
    assert Options(bucket_cap_mb=1e-12).bucket_bytes == 0


def test_a_rank_outside_of_the_group_is_told_so() -> None:
    outside: Any = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(OptionError) as caught:
        Options(process_group=outside)
    assert caught.value.seen == "this rank is no member of it"
    Options(process_group=None)


@pytest.mark.parametrize("step", [3, "step", torch.ones(2)])
def test_a_step_that_cannot_be_called(step: Any) -> None:
    for give in (gradsync_fx.optimize, gradsync_fx.optimize()):
        with pytest.raises(OptionError, match="argument 'train_step'"):
            give(step)


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_the_decorator_stands_below_these(kind: Any) -> None:
    with pytest.raises(OptionError, match="argument 'train_step'") as caught:
        gradsync_fx.optimize()(kind(print))
    assert caught.value.fix == f"put @{kind.__name__} above @gradsync_fx.optimize(...)"
    kind(gradsync_fx.optimize()(print))


@pytest.mark.parametrize("options", [3, [("reduction", "sum")], {1: 2}])
def test_options_of_the_backend_are_names_and_values(options: Any) -> None:
    with pytest.raises(OptionError, match="argument"):
        torch.compile(print, backend="gradsync", options=options)
    torch.compile(print, backend="gradsync", options={"gradient_accumulation_steps": 4})
