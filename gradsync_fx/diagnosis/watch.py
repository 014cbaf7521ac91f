"""The recorder: wraps what an eager loop calls, records events, and restores everything when the block ends.

Every call is passed on unchanged, and so is its result. Nothing is sent to other ranks: collectives are
counted by the sequence number that the group itself keeps. Gradients are read (is there one, its norm), never written.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync_fx._torch import is_compiled, started_collectives
from gradsync_fx.classes import family
from gradsync_fx.diagnosis import events, graph
from gradsync_fx.diagnosis.events import Event
from gradsync_fx.user_lines import up_to_users, user_line


class Watch:
    """What has been seen so far.

    events: in order. parameters: all that may hold gradients, by id. wrappers: all DDP modules of the process. groups:
    those whose collectives are counted. after_backward: called when one was recorded; it may end the watch, or raise.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.events: list[Event] = []
        self.after_backward: Callable[[], None] = lambda: None
        self.parameters: dict[int, Tensor] = {}
        # By the mro: isinstance would run Python code of DDP's for each object of the process.
        self.wrappers: list[DistributedDataParallel] = [
            o for o in gc.get_objects() if DistributedDataParallel in type(o).__mro__
        ]
        self.hooks = ExitStack()
        found: list[Any] = [group] if group else [w.process_group for w in self.wrappers]
        if group is None and dist.is_available() and dist.is_initialized():
            found.append(dist.group.WORLD)
        self.groups = list(dict.fromkeys(found))
        self._no_syncs: list[str] = []
        self._inside: list[str] = []  # which of the wrapped calls are running now
        self._norm = 0.0
        self._sent = self._sequence()

    # What is read from the outside world.

    def _sequence(self) -> int | None:
        """Collectives that the groups have started so far; None where one does not count."""
        counts = [started_collectives(g) for g in self.groups]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    def _held(self) -> frozenset[int]:
        """Parameters whose gradient is not zero now; renews the norm of all of them."""
        norms = {i: graph.norm(p.grad) for i, p in self.parameters.items() if p.grad is not None}
        self._norm = math.hypot(*norms.values())
        return frozenset(i for i, value in norms.items() if value != 0)

    def _catch_up(self, line: str) -> frozenset[int]:
        """Records what happened by hand since the last event: gradients changed, collectives started."""
        before = self._norm
        held = self._held()
        if before and self._norm:
            factor = before / self._norm
            if math.isfinite(factor) and not math.isclose(factor, 1, rel_tol=1e-4):
                self.events.append(events.Rescaled(line, factor))
        sent = self._sequence()
        if sent is not None and self._sent is not None and sent > self._sent:
            self.events.append(events.SentByHand(line))
        self._sent = sent
        return held

    def _settle(self) -> None:
        """Takes the norm and the count anew: what just happened was not done by hand."""
        self._held()
        self._sent = self._sequence()

    @contextmanager
    def _running(self, name: str) -> Iterator[None]:
        self._inside.append(name)
        try:
            yield
        finally:
            self._inside.remove(name)

    # The wrapped calls.

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            line = user_line()
            self._catch_up(line)
            self.watch(ddp.parameters())
            synced = torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)
            if torch.is_grad_enabled():
                self.events.append(events.Forward(line, synced, bypassed=False))
            with self._running("forward"):
                result = original(ddp, *args, **kwargs)
            self._sent = self._sequence()
            return result

        return forward

    def created(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            self._meet(ddp)

        return __init__

    def inner_forward(self, _module: nn.Module, _args: Any) -> None:
        """A hook before the forward of a module inside a DDP module."""
        if "forward" not in self._inside and torch.is_grad_enabled():
            self.events.append(events.Forward(user_line(), synced=False, bypassed=True))

    def no_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def no_sync(ddp: DistributedDataParallel) -> Iterator[None]:
            with original(ddp):
                self._no_syncs.append(user_line())
                try:
                    yield
                finally:
                    self._no_syncs.pop()

        return no_sync

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if "backward" in self._inside:  # of a checkpointed region, inside of another
                return original(tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            roots = [t for t in roots if isinstance(t, Tensor)]
            line, by_accelerate = user_line(), _by_accelerate()
            reached = graph.reached(roots)
            self.parameters |= reached
            before = self._catch_up(line)
            divisions = graph.divisions(roots[0]) if roots else ()
            sent = self._sequence()
            with self._running("backward"):
                result = original(tensors, *args, **kwargs)
            now = self._sequence()
            self._settle()
            after = self._held()
            self.events.append(
                events.Backward(
                    line,
                    no_sync=self._no_syncs[-1] if self._no_syncs else "",
                    collectives=None if now is None or sent is None else now - sent,
                    divisions=divisions,
                    reached=frozenset(reached) | (after - before),
                    before=before,
                    after=after,
                    by_accelerate=by_accelerate,
                    in_step="step" in self._inside,
                )
            )
            self.after_backward()
            return result

        return backward

    def joined(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of the default group, where it is made in the block."""

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if dist.group.WORLD is not None:  # or it has no rank of this process
                self.groups.append(dist.group.WORLD)
            self._sent = self._sequence()

        return init_process_group

    def _meet(self, ddp: DistributedDataParallel) -> None:
        """Of a DDP module that was not there at first: made in the block."""
        if not any(ddp is w for w in self.wrappers):
            self.wrappers.append(ddp)
            self.hook(ddp)
            if ddp.process_group not in self.groups:
                self.groups.append(ddp.process_group)
            self._sent = self._sequence()  # making one sends its parameters

    def hook(self, ddp: DistributedDataParallel) -> None:
        """Looks out for calls of the module inside; not where it is compiled, which a hook would do anew."""
        if not is_compiled(ddp.module):
            handle = ddp.module.register_forward_pre_hook(self.inner_forward)
            self.hooks.callback(handle.remove)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        self.parameters |= {id(p): p for p in parameters if p.requires_grad}

    def simple(self, kind: type[Event], name: str) -> Callable[[Callable[..., Any]], Any]:
        """For calls of which it matters only that they were made, outside of each other."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                own = name not in self._inside and not (
                    name == "unscale" and "scaler" in self._inside
                )
                if name == "unscale" and not args[0].is_enabled():
                    own = False
                if name == "schedule" and sys._getframe(1).f_code.co_name == "_initial_step":
                    own = False
                if not own:
                    return original(*args, **kwargs)
                line = user_line()
                self._catch_up(line)
                self.events.append(kind(line))
                with self._running(name):
                    result = original(*args, **kwargs)
                self._settle()
                return result

            return call

        return wrap

    def scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A GradScaler leaves the optimizer's step out where gradients are not finite: an update all the same."""

        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            line = user_line()
            held = self._catch_up(line)
            self.before_step(optimizer, (), {}, line=line, held=held, scaler=True)
            with self._running("scaler"):
                result = original(scaler, optimizer, *args, **kwargs)
            self._settle()
            return result

        return step

    def before_step(
        self, optimizer: Optimizer, _args: Any, _kwargs: Any, *,
        line: str = "", held: frozenset[int] | None = None, scaler: bool = False,
    ) -> None:  # fmt: skip
        """A hook before every optimizer's step."""
        if "scaler" in self._inside:
            return
        line = line or user_line()
        own = {id(p): p for g in optimizer.param_groups for p in g["params"]}
        held = self._catch_up(line) if held is None else held
        self.watch(own.values())
        mine = frozenset(own)
        self.events.append(events.Stepped(line, id(optimizer), mine, held & mine, scaler))
        if not scaler:
            self._inside.append("step")

    def after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """A hook after every optimizer's step."""
        if "step" in self._inside:
            self._inside.remove("step")
        self._settle()

    def all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A reduction of a tensor too small to be the gradients, and none of them, is a metric's."""

        def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent = self._sequence()
            result = original(tensor, *args, **kwargs)
            now = self._sequence()
            if self._is_gradient(tensor):
                self.events.append(events.SentByHand(user_line()))
            elif now is not None and sent is not None and self._sent is not None:
                self._sent += now - sent
            return result

        return all_reduce

    def _is_gradient(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return True
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        spaces = {g.untyped_storage().data_ptr() for g in grads if not g.is_sparse}
        if not tensor.is_sparse and tensor.untyped_storage().data_ptr() in spaces:
            return True
        return tensor.is_floating_point() and 2 * tensor.numel() >= sum(g.numel() for g in grads)


@contextmanager
def watching(group: dist.ProcessGroup | None) -> Iterator[Watch]:
    """Watches what this process does in the block. group: whose collectives are counted."""
    watch = Watch(group)
    clip = watch.simple(events.Clip, "clip")
    schedule = watch.simple(events.Scheduled, "schedule")
    zero = watch.simple(events.Zero, "zero")
    functions: list[tuple[Any, Callable[..., Any]]] = [
        (torch.autograd.backward, watch.backward),
        (nn.utils.clip_grad_norm_, clip),
        (nn.utils.clip_grad_value_, clip),
    ]
    if dist.is_available():
        functions.append((dist.all_reduce, watch.all_reduce))
        if group is None:
            functions.append((dist.init_process_group, watch.joined))
    with ExitStack() as stack:
        stack.enter_context(_everywhere([(f, wrap(f)) for f, wrap in functions]))
        for owner, name, change in (
            (DistributedDataParallel, "__init__", watch.created),
            (DistributedDataParallel, "forward", watch.forward),
            (DistributedDataParallel, "no_sync", watch.no_sync),
            (Optimizer, "zero_grad", zero),
            (nn.Module, "zero_grad", zero),
            (torch.amp.GradScaler, "unscale_", watch.simple(events.Unscale, "unscale")),
            (torch.amp.GradScaler, "step", watch.scaler_step),
            *((c, "step", schedule) for c in family(LRScheduler) if "step" in vars(c)),
        ):
            stack.enter_context(mock.patch.object(owner, name, change(getattr(owner, name))))
        stack.enter_context(watch.hooks)
        for ddp in watch.wrappers:
            watch.hook(ddp)
        stack.callback(register_optimizer_step_pre_hook(watch.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(watch.after_step).remove)
        yield watch


def _by_accelerate() -> bool:
    """Whether Accelerate is what called from the user's line."""
    between = up_to_users()[:-1]
    return any(f"{os.sep}accelerate{os.sep}" in f.f_code.co_filename for f in between)


@contextmanager
def _everywhere(changes: list[tuple[Any, Any]]) -> Iterator[None]:
    """Replaces functions by others under every name that any module has for them, until the block ends.

    Modules that are imported inside the block are restored as well. A replacement that is kept elsewhere (in a default
    argument, say) calls the original from then on.
    """
    over = threading.Event()

    def until_over(function: Callable[..., Any], other: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if over.is_set() else other)(*args, **kwargs)

        return call

    pairs = [(function, until_over(function, other)) for function, other in changes]
    _put(pairs)
    try:
        yield
    finally:
        over.set()
        _put([(other, function) for function, other in pairs])


def _put(changes: list[tuple[Any, Any]]) -> None:
    by_id = {id(function): other for function, other in changes}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name, value in list(names.items()):
                if id(value) in by_id:
                    names[name] = by_id[id(value)]
