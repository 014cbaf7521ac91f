"""What compilers ask of the machine is found out while the step is traced: mostly in another process, and in files.

Inductor asks which vector instructions work (a process that loads a library, which is compiled where it is missing),
and for digests of torch's and Triton's sources, which are part of all of its keys. Each takes some tenths of a second.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from functools import cache

import torch

from gradsync_fx._torch_cpp import pick_vec_isa, prefetch_keys


log = logging.getLogger(__name__)


@cache
def look_ahead() -> threading.Thread | None:
    """Begins, once in a process. Instructions of the CPU are not asked for where an accelerator is likely to run."""
    prefetch_keys()
    if torch.accelerator.is_available():
        return None
    # Settings of Inductor's may be in force here only.
    looking = threading.Thread(
        target=contextvars.copy_context().run,
        args=(_instructions,),
        name="gradsync_fx looks at the processor",
        daemon=True,
    )
    looking.start()
    return looking


def _instructions() -> None:
    try:
        pick_vec_isa()
    except Exception as failure:
        # Inductor asks once more, and raises it where it is wanted.
        log.debug("which vector instructions there are is not known yet: %s", failure)


def looked() -> None:
    """What has begun is over: Inductor would ask the same beside it."""
    if look_ahead.cache_info().currsize and (looking := look_ahead()) is not None:
        looking.join()
