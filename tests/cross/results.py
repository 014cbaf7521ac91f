"""What was made of one program for one target, as data, and what is checked of it."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync_fx.ir.journal import Recording
from gradsync_fx.lowering.target.wrapper import HostEvent


ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Lowered:
    """One program for one target.

    inputs: label -> device of each input, "parameter 0.weight" -> "cuda". events: of the wrapper, with the labels of
    inputs in place of its variables, and what is moved in bytes. sizes: label -> elements and bytes of each input that
    is a tensor of the device. kernels: all that the wrapper has. binaries: kernel -> its architecture in PTX and
    the bytes of its cubin, for each choice of block sizes. buckets: those of the plan. source: Inductor's module.
    recording: whether a CUDA graph can replay it. offsets: where the sums lie in the memory of their buckets, in bytes.
    """

    program: str
    target: str
    inputs: dict[str, str]
    sizes: dict[str, tuple[int, int]]
    events: tuple[HostEvent, ...]
    kernels: tuple[str, ...]
    binaries: tuple[tuple[str, str, int], ...]
    buckets: int
    source: str
    recording: Recording
    offsets: dict[str, int]

    def of(self, *kinds: str) -> list[HostEvent]:
        return [e for e in self.events if e.kind in kinds]

    @property
    def launches(self) -> int:
        """Kernels that one call starts: Triton's and the libraries'."""
        return len(self.of("launch", "fill", "copy", "extern"))


def every_kernel_became_a_cubin(made: Lowered) -> None:
    """PTX and cubin, both of the target that was asked for."""
    assert made.kernels
    for kernel in made.kernels:
        found = [(arch, size) for name, arch, size in made.binaries if name == kernel]
        assert found, f"{kernel} was not compiled"
        for arch, size in found:
            assert arch.rstrip("a") == made.target, f"{kernel} was compiled for {arch}"
            assert size, f"{kernel} has no cubin"


def nothing_but_sums(made: Lowered) -> None:
    """No collective, and no kernel that has to do with an optimizer's state or writes a parameter."""
    assert made.of("reduce", "wait") == [], "gradients are reduced"
    for event in made.events:
        states = [n for n in (*event.reads, *event.writes) if n.startswith("state ")]
        written = [n for n in event.writes if n.startswith("parameter ")]
        assert not states, f"{event.name} reads or writes {states[0]}"
        assert not written, f"{event.name} writes {written[0]}"


def one_reduction_for_each_bucket(made: Lowered, beside: int = 0) -> None:
    """Started once, and waited for once. beside: reductions of windows' weights that travel alone."""
    reductions = made.of("reduce")
    assert all("all_reduce" in e.name or "gradsync_fx.start" in e.name for e in reductions)
    assert len(reductions) == len(made.of("wait")) == made.buckets + beside


def sums_are_sent_as_they_lie(made: Lowered) -> None:
    """What is reduced is the running sums themselves: no flat tensor is put together for it."""
    for event in made.of("reduce"):
        copies = [name for name in event.reads if not name.startswith("accumulator ")]
        assert not copies, f"{event.name} sends {', '.join(copies)}"


def waits_stand_at_first_readers(made: Lowered) -> None:
    """What the device does after a wait reads what was waited for: the rest is on its way meanwhile."""
    for i, event in enumerate(made.events):
        if event.kind == "wait":
            following = next(e for e in made.events[i + 1 :] if e.kind not in ("wait", "read"))
            found = set(event.reads) & set(following.reads)
            assert found, (
                f"{following.name} waits for {', '.join(event.reads)}, which it does not read"
            )


def sums_are_aligned(made: Lowered) -> None:
    """At 16 bytes: Inductor clones inputs that lie elsewhere, in every call."""
    assert made.offsets
    wrong = {name: offset for name, offset in made.offsets.items() if offset % ALIGNED}
    assert not wrong, f"not at {ALIGNED} bytes: {wrong}"


def updates_are_few_launches(made: Lowered) -> None:
    """At most 4 for each bucket: not one for each parameter. Of parameters of one dtype."""
    written = ("parameter ", "state ")
    found = [
        e
        for e in made.of("launch", "fill", "copy", "extern")
        if any(name.startswith(written) for name in e.writes)
    ]
    assert found, "nothing is updated"
    assert len(found) <= 4 * made.buckets, f"{len(found)} launches for {made.buckets} buckets"


def reductions_start_in_backward(made: Lowered) -> None:
    """The first bucket is on its way while products of the backward that fill later ones are still to come."""
    starts = [i for i, event in enumerate(made.events) if event.kind == "reduce"]
    assert len(starts) > 1, "one bucket has no other to overlap with"
    needed = {name for i in starts[1:] for name in made.events[i].reads}
    later = 0
    for event in reversed(made.events[starts[0] + 1 : starts[-1]]):
        if needed.intersection(event.writes):
            needed.update(event.reads)
            later += event.kind == "extern"
    assert later, "no product of the backward is left when the first bucket is sent"


def attention_is_one_kernel(made: Lowered, form: str) -> None:
    """In this form, forward and backward; no product of queries and keys is written out."""
    found = [e.name for e in made.of("extern") if "attention" in e.name]
    assert found, "no attention"
    assert all(f"_scaled_dot_product_{form}_attention" in name for name in found), found
    assert any("backward" in name for name in found), "no backward of the attention"
    assert not any(e.name.endswith(".bmm") for e in made.of("extern"))


def the_host_never_waits(made: Lowered) -> None:
    """It reads no tensor of the device, and copies none between devices."""
    for event in made.of("read"):
        (tensor,) = event.reads
        assert made.inputs.get(tensor) == "cpu", f"{event.name}() of {tensor}"
    assert made.of("transfer", "host") == []
