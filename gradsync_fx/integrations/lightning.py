"""Makes a training step from a `LightningModule`, as Lightning's Trainer does in its loop.

step = gradsync_fx.optimize(step_of(module), gradient_accumulation_steps=4)
for batch in loader:
    loss = step(batch)

loss = training_step(batch) -> backward -> clipping -> optimizer -> schedulers of interval "step"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradsync_fx.errors import OptionError
from gradsync_fx.user_lines import warn_user


# Methods that Lightning's Trainer calls between forward and the next batch. A step that left out what a module does in
# the first would train otherwise; the others belong around it.
_IN_THE_STEP = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
_ROUND_THE_STEP = {
    "configure_callbacks": "make their calls in the loop around it",
    "configure_model": "call it before the loop, and before making the optimizer",
    "on_fit_end": "call it after the loop",
    "on_fit_start": "call it before the loop",
    "on_train_batch_end": "call it in the loop around it",
    "on_train_batch_start": "call it in the loop around it",
    "on_train_end": "call it after the loop",
    "on_train_epoch_end": "call it in the loop around it",
    "on_train_epoch_start": "call it in the loop around it, before each epoch",
    "on_train_start": "call it before the loop",
    "setup": "call it before the loop, and before making the optimizer",
}
# What a module knows from its Trainer, and what it gets without one.
_OF_THE_TRAINER = {
    "current_epoch": "0 in every call",
    "global_step": "0 in every call",
    "trainer": "an error without a Trainer",
}
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LEGAL = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def step_of(
    module: LightningModule,
    configured: Any = None,
    *,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
) -> LightningStep:
    """The training step of a LightningModule, for `gradsync_fx.optimize`.

    configured: what `configure_optimizers` gives, any return value with one optimizer; by default it is called.
    gradient_clip_val, gradient_clip_algorithm: as in Lightning's Trainer.

    Raises `OptionError` for a module with manual optimization or more than one optimizer, for one that overrides what
    stands between forward and update, and for schedulers with a frequency.
    """
    if not module.automatic_optimization:
        raise OptionError(
            f"{type(module).__name__}",
            seen="automatic_optimization=False: training_step makes the updates itself",
            wanted="a training_step that returns a loss",
            fix="write the step as a function of its own, and optimize that",
        )
    for name in _IN_THE_STEP:
        if _overrides(module, name):
            raise OptionError(
                f"{type(module).__name__}.{name}",
                seen="it is overridden: a step made of training_step alone would leave it out",
                wanted="a module that leaves what comes after the loss to Lightning",
                fix="write the step as a function of its own, with what this method does in it",
            )
    left_out = [
        f"{name} is not part of the step: {way}"
        for name, way in _ROUND_THE_STEP.items()
        if _overrides(module, name)
    ]
    left_out += [
        f"{method} reads self.{name}, which is {value}: give the step what depends on it as part of the batch"
        for method, name, value in _reads_of_the_trainer(type(module))
    ]
    for text in left_out:
        warn_user(f"{type(module).__name__}.{text}")
    if gradient_clip_algorithm not in ("norm", "value"):
        raise OptionError(
            "gradient_clip_algorithm",
            seen=repr(gradient_clip_algorithm),
            wanted="'norm' or 'value'",
            fix="pass one of them",
        )
    optimizer, schedules = _configured(
        module.configure_optimizers() if configured is None else configured
    )
    clip = (gradient_clip_val or 0.0, gradient_clip_algorithm)
    return LightningStep(module, optimizer, schedules, clip)


class LightningStep:
    """One micro-step of a LightningModule: `step(batch, batch_idx=0)` gives what `training_step` returned.

    logged: what `self.log` and `self.log_dict` were given in the last call, by name, tensors detached.
    """

    # No __dict__: `optimize` gives its own step the attributes of the one that it wraps, as they are at that time.
    __slots__ = (
        "__weakref__",
        "_arguments",
        "_batch_hooks",
        "_clip_algorithm",
        "_clip_value",
        "_each_step",
        "_module",
        "_schedules",
        "logged",
        "optimizer",
    )

    def __init__(
        self,
        module: LightningModule,
        optimizer: Optimizer,
        schedules: list[dict[str, Any]],
        clip: tuple[float, str],
    ) -> None:
        self.optimizer = optimizer
        self.logged: dict[str, Any] = {}
        self._schedules = schedules
        self._each_step = [s for s in schedules if s["interval"] == "step"]
        self._clip_value, self._clip_algorithm = clip
        self._module = _twin(module, self)
        self._batch_hooks = _batch_hooks(module)
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        self._arguments = 2 if takes_index else 1

    def __call__(self, batch: Any, batch_idx: int = 0) -> Any:
        self.logged = {}
        for hook in self._batch_hooks:
            batch = hook(batch)
        result = self._module.training_step(*(batch, batch_idx)[: self._arguments])
        loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
        loss.backward()
        if self._clip_value:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            if self._clip_algorithm == "norm":
                clip_grad_norm_(held, self._clip_value)
            else:
                clip_grad_value_(held, self._clip_value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for schedule in self._each_step:
            _advance(schedule, self.logged)
        return result

    def end_epoch(self, **metrics: float) -> None:
        """Steps the schedulers of interval "epoch". metrics: what they monitor, by name; else what was logged last."""
        for schedule in self._schedules:
            if schedule["interval"] == "epoch":
                _advance(schedule, {**self.logged, **metrics})


def _overrides(module: LightningModule, name: str) -> bool:
    return getattr(type(module), name) is not getattr(LightningModule, name)


def _batch_hooks(module: LightningModule) -> list[Callable[[Any], Any]]:
    """Those of its own, as the Trainer calls them before training_step."""

    def hook(name: str) -> Callable[[Any], Any]:
        method = getattr(module, name)
        if name == "transfer_batch_to_device":
            return lambda batch: method(batch, module.device, 0)
        return lambda batch: method(batch, 0)

    return [hook(name) for name in _BATCH_HOOKS if _overrides(module, name)]


def _reads_of_the_trainer(kind: type) -> Iterator[tuple[str, str, str]]:
    """What training_step, and the methods that it names, read of a Trainer: method, attribute, what they get."""
    methods = ["training_step", "forward"]
    for method in methods:  # grows on the way
        for owner in kind.__mro__[: kind.__mro__.index(LightningModule)]:
            code = getattr(vars(owner).get(method), "__code__", None)
            names = code.co_names if code is not None else ()
            methods += [n for n in names if hasattr(kind, n) and n not in methods]
            yield from ((method, n, _OF_THE_TRAINER[n]) for n in names if n in _OF_THE_TRAINER)


def _twin(module: LightningModule, step: LightningStep) -> LightningModule:
    """A second object of the module, all attributes shared, with a `log` that needs no Trainer."""
    kind: Any = type(module)

    class Twin(kind):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            step.logged[name] = value.detach() if isinstance(value, Tensor) else value

        def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            for name, value in dictionary.items():
                self.log(name, value)

    twin: LightningModule = object.__new__(Twin)
    twin.__dict__ = module.__dict__
    return twin


def _advance(schedule: dict[str, Any], metrics: Mapping[str, Any]) -> None:
    if isinstance(schedule["scheduler"], ReduceLROnPlateau):
        schedule["scheduler"].step(metrics[schedule["monitor"]])
    else:
        schedule["scheduler"].step()


def _configured(given: Any) -> tuple[Optimizer, list[dict[str, Any]]]:
    """The optimizer and its schedules, from any value that `configure_optimizers` may give."""
    if isinstance(given, Mapping):
        found = given.get("lr_scheduler")
        optimizers, schedulers = [given["optimizer"]], [] if found is None else [found]
    elif isinstance(given, Sequence) and len(given) == 2 and isinstance(given[0], Sequence):
        optimizers, schedulers = list(given[0]), list(given[1])
    elif isinstance(given, Sequence) and len(given) == 1:
        return _configured(given[0])
    else:
        optimizers, schedulers = list(given) if isinstance(given, Sequence) else [given], []
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise OptionError(
            "configure_optimizers",
            seen=f"{len(optimizers)} of {', '.join(type(o).__name__ for o in optimizers)}",
            wanted="one optimizer, which is all that Lightning updates by itself",
            fix="return one optimizer, or write the step as a function of its own",
        )
    return optimizers[0], [_schedule(s) for s in schedulers]


def _schedule(given: Any) -> dict[str, Any]:
    """Lightning's dictionary of one scheduler, with its defaults."""
    asked = given if isinstance(given, Mapping) else {"scheduler": given}
    schedule = {"interval": "epoch", "frequency": 1, "monitor": None, **asked}
    needs = isinstance(schedule["scheduler"], ReduceLROnPlateau) and schedule["monitor"] is None
    unknown = sorted(set(schedule) - _LEGAL)
    if (
        unknown
        or needs
        or schedule["frequency"] != 1
        or schedule["interval"] not in ("epoch", "step")
    ):
        raise OptionError(
            f"lr_scheduler {type(schedule['scheduler']).__name__}",
            seen=", ".join(f"{key}={value!r}" for key, value in asked.items() if key != "scheduler")
            or "ReduceLROnPlateau without monitor",
            wanted="interval 'epoch' or 'step', frequency 1, and a monitor where the scheduler needs a metric",
            fix="leave this scheduler out of the step, and step it in the loop under `if step.sync_gradients:`",
        )
    return schedule
