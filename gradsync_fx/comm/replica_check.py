"""What has to be the same on all ranks before they train together: options, the model's tensors, their values.

Asked once, at the first call. Ranks that differ here would later send each other collectives of different sizes, on
which gloo ends the process, or train copies that drift apart. Whether they do is asked again after updates (drift.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.errors import RanksDisagreeError, ReplicaMismatchError


FIRST = "at its first call"


def check_replicas(
    line: Line,
    options: Mapping[str, object],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    optimizers: Sequence[str],
) -> None:
    """Raises, on every rank, what differs first.

    `RanksDisagreeError` for an option or an optimizer, `ReplicaMismatchError` for a parameter or buffer: another number
    of them, another name, shape or dtype, or (parameters only) other bytes. optimizers: what has to be alike of them.
    """
    held = {"parameters": parameters, "buffers": buffers}
    forms = {what: [_form(n, t) for n, t in tensors.items()] for what, tensors in held.items()}
    rows = line.gather(
        [
            *(_number(repr(value)) for value in options.values()),
            *(float(len(tensors)) for tensors in held.values()),
            *(_number(repr(form)) for form in forms.values()),
            number_of_all(optimizers),
        ],
        where=FIRST,
    )
    columns = iter(zip(*rows, strict=True))
    for name, value in options.items():
        if len(set(next(columns))) > 1:
            raise _other_option(name, line.texts(str(value)))
    for what, counts in zip(held, columns, strict=False):
        if len(set(counts)) > 1:
            told = ", ".join(f"rank {r} has {int(n)} {what}" for r, n in enumerate(counts))
            raise _other_model("the model", told, "equal copies of the model on all ranks")
    for what, sums in zip(forms, columns, strict=False):
        if len(set(sums)) > 1:
            raise _other_form(what, [t.split("\n") for t in line.texts("\n".join(forms[what]))])
    check_optimizers(line, next(columns), lambda: optimizers)
    _check_values(line, parameters)


def number_of_all(optimizers: Sequence[str]) -> float:
    """For all that is told of them; 0 for nothing: a rank that knows of none has nothing to compare."""
    return _number("\n".join(optimizers)) if optimizers else 0.0


def alike_updates(line: Line, mine: Sequence[str]) -> None:
    """Raises `RanksDisagreeError`, on every rank, where ranks are about to make another update than each other."""
    numbers = [row[0] for row in line.gather([number_of_all(mine)])]
    check_optimizers(line, numbers, lambda: mine)


def check_optimizers(
    line: Line, numbers: Iterable[float], mine: Callable[[], Sequence[str]]
) -> None:
    """Raises `RanksDisagreeError`, on every rank, where what is told of the ranks' optimizers differs.

    numbers: of all ranks, by `number_of_all`. mine: what this rank tells; asked only where they differ.
    """
    if len(set(numbers) - {0.0}) <= 1:
        return
    told = [text.split("\n") if text else [] for text in line.texts("\n".join(mine()))]
    longest = max(map(len, told))
    padded = [[*lines, *["nothing more"] * (longest - len(lines))] for lines in told if lines]
    ranks = [rank for rank, lines in enumerate(told) if lines]
    i = next(i for i, same in enumerate(zip(*padded, strict=True)) if len(set(same)) > 1)
    shown = zip(ranks, (lines[i] for lines in padded), strict=True)
    raise RanksDisagreeError(
        "the optimizers",
        seen=", ".join(f"rank {rank} has {text}" for rank, text in shown),
        wanted="the same optimizers on all ranks, with the same groups, settings and state: each rank makes the update "
        "by its own",
        fix="build, load and change the optimizers on every rank alike",
    )


def _check_values(line: Line, parameters: Mapping[str, torch.Tensor]) -> None:
    rows = line.gather([_checksum(t) for t in parameters.values()], where=FIRST)
    for i, name in enumerate(parameters):
        for rank, row in enumerate(rows):
            if row[i] != rows[0][i]:
                raise ReplicaMismatchError(
                    f"parameter {name!r}",
                    seen=f"rank {rank} starts with other values than rank 0",
                    wanted="equal copies of the model on all ranks",
                    fix="seed all ranks alike before the model is built, load the same weights, or wrap it in DDP",
                )


def _other_option(name: str, values: list[str]) -> RanksDisagreeError:
    return RanksDisagreeError(
        f"option {name!r}",
        seen=", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values)),
        wanted="the same options on all ranks: they decide what is sent, and when",
        fix="pass the same arguments to optimize (and to DistributedDataParallel) on every rank",
    )


def _other_form(what: str, forms: list[list[str]]) -> ReplicaMismatchError:
    i = next(i for i, same in enumerate(zip(*forms, strict=True)) if len(set(same)) > 1)
    return _other_model(
        f"the {what} of the model",
        ", ".join(f"rank {rank} has {mine[i]}" for rank, mine in enumerate(forms)),
        "the same names, shapes and dtypes on all ranks, in the same order",
    )


def _other_model(culprit: str, seen: str, wanted: str) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        culprit,
        seen=seen,
        wanted=wanted,
        fix="build the same model on every rank; where branches of the step call different models, let all ranks begin "
        "with the same branch",
    )


def _form(name: str, tensor: torch.Tensor) -> str:
    return f"{name!r} of shape {tuple(tensor.shape)}, {tensor.dtype}"


def _number(text: str) -> float:
    return float(zlib.crc32(text.encode()))


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return zlib.crc32(flat.numpy().tobytes())
