"""Optimized steps as methods: each object has its own, whatever a class, a copy or a second name makes of it."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from tests.models import mlp
from tests.reference import mse, regression
from tests.refusals import refused


(X, Y), *_ = regression(1, 1)[0]
two: Any = functools.partial(gradsync_fx.optimize, gradient_accumulation_steps=2, backend="eager")


class Trainer:
    """Its decorated method is the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen: list[str] = []

    @two()
    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(self.model, x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Override(Trainer):
    """Calls the step of its base class."""

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.append("override")
        return super().train_step(x, y)


def plain(trainer: Trainer, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(trainer.model, x, y)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss


class Named(Trainer):
    """The step under a name that is not its function's."""

    fit = two(plain)
    also = fit


def test_an_override_is_called_every_time() -> None:
    trainer = Override()
    for _ in range(4):
        trainer.train_step(X, Y)
    assert trainer.seen == ["override"] * 4
    assert Trainer.train_step.__get__(trainer).optimizer_step == 2


def test_an_override_that_is_decorated_itself_has_a_window_of_its_own() -> None:
    class Both(Trainer):
        @two()
        def train_step(self, x: Tensor, y: Tensor) -> Tensor:
            return 2 * plain(self, x, y)

    trainer = Both()
    for _ in range(2):
        trainer.train_step(X, Y)
    assert trainer.train_step.optimizer_step == 1
    assert super(Both, trainer).train_step.micro_step == 0


def test_a_step_under_another_name_is_one_step_of_each_object() -> None:
    one, other = Named(), Named()
    assert one.fit is one.fit
    assert one.fit is one.also, "one object of the class, under two names"
    for _ in range(3):
        one.fit(X, Y)
    other.fit(X, Y)
    assert (one.fit.optimizer_step, one.fit.pending) == (1, 1)
    assert (other.fit.optimizer_step, other.fit.pending) == (0, 1)
    assert Named.fit.micro_step == 0, "the class's own"
    for each in (one, other):
        each.fit.discard()


class Counted(OptimizedStep[..., Any]):
    """A step that counts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        counts.append(args)
        return super().__call__(*args, **kwargs)


counts: list[Any] = []


def test_a_subclass_of_the_step_stays_one() -> None:
    class Sub(Trainer):
        fit: Any = Counted(plain, Options(backend="eager"))

    trainer = Sub()
    trainer.fit(X, Y)
    assert type(trainer.fit) is Counted
    assert len(counts) == 1


class Slotted:
    """Its objects have no `__dict__`."""

    __slots__ = ("__weakref__", "model", "optimizer")

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    fit = two(plain)


class WithDict(Slotted):
    """What the error advises."""

    __slots__ = ("__dict__",)


def test_objects_with_slots() -> None:
    error = refused(gradsync_fx.WindowError, "method 'plain' of Slotted", lambda: Slotted().fit)
    assert "__dict__" in error.fix
    trainer = WithDict()
    trainer.fit(X, Y)
    trainer.fit(X, Y)
    assert trainer.fit.optimizer_step == 1


def test_a_copy_of_an_object_has_windows_of_its_own() -> None:
    trainer = Named()
    trainer.fit(X, Y)
    deep, shallow = copy.deepcopy(trainer), copy.copy(trainer)
    sent = pickle.loads(pickle.dumps(trainer))
    for other in (deep, shallow, sent):
        assert other.fit is not trainer.fit
        assert other.fit.micro_step == 0
    for other in (deep, sent):
        other.fit(X, Y)
        other.fit(X, Y)
        assert other.fit.optimizer_step == 1
    trainer.fit(X, Y)
    assert trainer.fit.optimizer_step == 1
    for mine, theirs in zip(trainer.model.parameters(), deep.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_module_with_a_step_is_copied_and_saved() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        @two()
        def train_step(self, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = mse(self.layer, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    module = Whole()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        module.train_step(optimizer, X, Y)
    average = copy.deepcopy(module)
    assert average.train_step.micro_step == 0
    assert list(average.state_dict()) == ["layer.weight", "layer.bias"]
    assert list(average.children()) == [average.layer]


def test_class_methods_and_static_methods() -> None:
    class Static:
        @staticmethod
        @two()
        def fit(trainer: Trainer, x: Tensor, y: Tensor) -> Tensor:
            return plain(trainer, x, y)

    class Class(Trainer):
        shared: Any

        @classmethod
        @two()
        def fit(cls, x: Tensor, y: Tensor) -> Tensor:
            return plain(cls.shared, x, y)

    class Below(Class):
        pass

    Class.shared, Below.shared = Trainer(), Trainer()
    for call in (
        lambda: Static.fit(Class.shared, X, Y),
        lambda: Static().fit(Class.shared, X, Y),
    ):
        call()
    assert Static.fit.optimizer_step == 1
    Class.fit(X, Y)
    Below.fit(X, Y)
    Below.fit(X, Y)


def test_what_does_not_bind_stays_as_it_is() -> None:
    """As in plain Python: callable objects, and methods of another object by now."""

    class Step:
        __name__ = "step"

        def __call__(self, trainer: Trainer, x: Tensor, y: Tensor) -> Tensor:
            return plain(trainer, x, y)

    trainer = Trainer()

    class Holder:
        by_object = two(Step())
        by_method = two(trainer.train_step.__wrapped__.__get__(trainer))

    holder = Holder()
    holder.by_object(Trainer(), X, Y)
    holder.by_method(X, Y)
    assert Holder.by_object.pending == Holder.by_method.pending == 1
    Holder.by_object.discard()
    Holder.by_method.discard()


def test_threads_that_are_first_at_once_get_one_step() -> None:
    together, switching = threading.Barrier(4), sys.getswitchinterval()

    def first_use(trainer: Named) -> int:
        together.wait()
        return id(trainer.fit)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for trainer in [Named() for _ in range(20)]:
                assert len(set(pool.map(first_use, [trainer] * 4))) == 1
    finally:
        sys.setswitchinterval(switching)


def test_an_object_goes_with_its_steps() -> None:
    trainer = Named()
    trainer.fit(X, Y)
    trainer.fit(X, Y)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
