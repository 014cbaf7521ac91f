"""The verdict on recording: what of a program a CUDA graph can replay, read off what the host does in it.

A graph replays what the device was asked to do, with the same addresses. What the host does itself, and numbers that it
hands over, are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gradsync_fx.lowering.target.made import Recording
from gradsync_fx.lowering.target.wrapper import Wrapper
from gradsync_fx.wording import number_of


# Events that no recording holds, in words.
OF_THE_HOST = {
    "read": "host read",
    "host": "CPU kernel",
    "upload": "upload",
    "transfer": "blocking copy",
}


def recording_of(wrapper: Wrapper, devices: Mapping[str, str], refused: str) -> Recording:
    """The verdict on one program.

    devices: of its inputs, by name; "host" for a number, "size" for one by which recordings are found. refused:
    Inductor's own reason, "" for none.
    """
    outside = Counter(
        e.kind for e in wrapper.events if e.kind in OF_THE_HOST and e.partition is None
    )
    why = [number_of(count, OF_THE_HOST[kind]) for kind, count in outside.items()]
    if wrapper.numbers:
        count = number_of(len(wrapper.numbers), "number")
        why.append(f"{count} of the host in a partition: a replay would not see another value")
    numbers = [name for name, device in devices.items() if device == "host"]
    if numbers and not wrapper.partitions:
        why.append(f"numbers of the host as inputs: {', '.join(numbers)}")
    sizes = [name for name, device in devices.items() if device == "size"]
    notes = [f"one recording for each value of {', '.join(sizes)}"] if sizes else []
    if refused:
        return Recording("no", wrapper.partitions, (refused, *why, *notes))
    if wrapper.partitions and not wrapper.numbers:
        return Recording("in parts" if why else "whole", wrapper.partitions, (*why, *notes))
    return Recording("no" if why else "whole", wrapper.partitions, (*why, *notes))
