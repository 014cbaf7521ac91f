"""An all-reduce in two levels, as a process group: ranks of one machine share it out, so that little goes between them.

    rank (machine, place):   S bytes on each rank
    inside    each place is sent its m-th part of the S bytes by the m ranks of its machine, and adds the terms up
    across    the ranks of one place, a machine each, all-reduce that part
    inside    each place sends its part to the others

So all m ranks of a machine together send about 2 S (n - 1) / n bytes to the n - 1 others: S for two machines, where a
ring of all ranks in block order sends 2 S (n m - 1) / (n m) over each link. Terms are added in the order of ranks, and
every rank holds the same bits in the end. Sums of dtypes below 4 bytes are added up in float32, inside.

To torch it is a group with a name like any other; programs reduce over it without knowing. It has no links of its own,
and nothing but `allreduce`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradsync_fx._torch import Work, register_group


class TwoLevels(ProcessGroup):
    """All-reduces over the ranks of a two-dimensional mesh, whose second dimension is the fast one.

    Where tensors are on the CPU, one thread does the work of all of them, in the order in which they were started: the
    same order on all ranks, and beside what the caller computes. On a device it is queued on a stream of its own.
    """

    def __init__(self, mesh: DeviceMesh, over: ProcessGroup, name: str) -> None:
        """over: the same ranks as one group. name: no other group's, the same on all ranks."""
        super().__init__(dist.get_rank(over), mesh.size())  # type: ignore[call-arg]  # one of its forms
        self.mesh, self.over, self.registered = mesh, over, name
        self.across, self.inside = mesh.get_group(0), mesh.get_group(1)
        self._queue: SimpleQueue[tuple[torch.Tensor, _Queued] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Held here, too: the thread would end them, as the process ends, where gloo cannot.
        self._owned: tuple[ProcessGroup, ...] = ()
        self._stream: torch.cuda.Stream | None = None
        register_group(self, name)

    def getBackendName(self) -> str:  # torch's name
        """For people: torch asks when it speaks of a group."""
        return "gradsync_fx two levels"

    def allreduce(self, tensors: Any, options: Any = None) -> Work:  # type: ignore[override]  # one of its forms
        """Starts the sum of one contiguous tensor over all ranks, in place. torch calls it."""
        (tensor,) = tensors
        if options is not None and options.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError(f"two levels add up; {options.reduceOp} was asked for")
        if tensor.device.type != "cpu":
            return self._on_stream(tensor)
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._queue, self._reduction()))
            self._thread.daemon = True
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        work = _Queued()
        self._queue.put((tensor, work))
        return work

    def _reduction(self) -> Callable[[torch.Tensor], None]:
        """The work itself, which keeps no hold of this object: the thread must not. Made where all ranks reduce."""
        across, inside = self._owned = _own(self.across), _own(self.inside)
        return lambda tensor: _reduce(tensor, inside, across)

    def _on_stream(self, tensor: torch.Tensor) -> Work:
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            _reduce(tensor, self.inside, self.across)
            event = torch.cuda.Event()
            event.record()
        tensor.record_stream(self._stream)
        return _Recorded(event, tensor.device)


def _own(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks, for the thread alone: a mesh's may be the default group, over which others speak too,
    in an order of their own."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)  # this rank is in it
    return made


class _Queued(Work):
    """One all-reduce of the thread."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()
        self.failure: BaseException | None = None

    def end(self, failure: BaseException | None) -> None:
        self.failure = failure
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: Any = None) -> bool:
        """Raises what stopped it; how long that takes is for the groups below to say."""
        self._done.wait()
        if self.failure is not None:
            raise RuntimeError(f"in two levels: {self.failure}") from self.failure
        return True


class _Recorded(Work):
    """One that a stream will have done when the event fires."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        super().__init__()
        self._event, self._device = event, device

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: Any = None) -> bool:
        """The caller's stream waits; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True


def _work_off(queue: SimpleQueue[Any], reduce: Callable[[torch.Tensor], None]) -> None:
    """After a failure the ranks are apart: what was queued behind it fails, too."""
    failed: BaseException | None = None
    while (item := queue.get()) is not None:
        tensor, work = item
        if failed is None:
            try:
                reduce(tensor)
            except BaseException as failure:  # the waiting thread's to raise
                failed = failure
        work.end(failed)
        del item, tensor, work


@torch.no_grad()
def _reduce(tensor: torch.Tensor, inside: ProcessGroup, across: ProcessGroup) -> None:
    flat = tensor.view(-1)
    ranks, place = dist.get_world_size(inside), dist.get_rank(inside)
    if ranks == 1:
        dist.all_reduce(flat, group=across)
        return
    sizes = [flat.numel() // ranks + (i < flat.numel() % ranks) for i in range(ranks)]
    own = sizes[place]
    terms = flat.new_empty(ranks * own)
    dist.all_to_all_single(terms, flat, [own] * ranks, sizes, group=inside)
    narrow = flat.is_floating_point() and flat.itemsize < 4
    part = terms.view(ranks, own).sum(0, dtype=torch.float32 if narrow else flat.dtype)
    part = part.to(flat.dtype)
    if dist.get_world_size(across) > 1:
        dist.all_reduce(part, group=across)
    dist.all_to_all_single(flat, part.repeat(ranks), sizes, [own] * ranks, group=inside)
