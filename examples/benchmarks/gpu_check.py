"""The first thing to run where there is a GPU: all that tests elsewhere can only tell from the code, on a real card.

    python examples/benchmarks/gpu_check.py

Each check has processes of its own, tells OK or FAIL with figures, and hides no other. NCCL joins one rank, and a rank
for each card where there are more; two ranks share the first card over gloo. Times are told, not judged. Exits with 1
where a check failed, and with 2 where torch sees no CUDA device.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_checks import BACKEND, CHECKS, OF_RANKS, planned
from verdicts import told


FAILED, NO_DEVICE = 1, 2  # exit codes
PATIENCE = 1200  # seconds for one check, compilation included


def commands() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Name, command and further environment of each process to start."""
    for name in CHECKS:
        own = [__file__, "--only", name]
        if name not in OF_RANKS:
            yield name, [sys.executable, *own], {}
            continue
        cards = torch.cuda.device_count()
        for backend, world in (
            ("nccl", 1),
            *((("nccl", cards),) if cards > 1 else ()),
            ("gloo", 2),
        ):
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            yield (
                f"{name}, {world} over {backend}",
                [sys.executable, *launcher, str(world), *own],
                {BACKEND: backend},
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=CHECKS, help="this check, in this process")
    parser.add_argument("--planned", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder")
    args = parser.parse_args()
    if args.planned:
        planned(args.planned)
        return 0
    if not torch.cuda.is_available():
        sys.stdout.write(
            f"no CUDA device is seen by torch {torch.__version__}: run this on a machine with a GPU and a CUDA build "
            "of torch; `python -m pytest -m cross` checks the code for GPUs without one\n"
        )
        return NO_DEVICE
    if args.only:
        return 0 if told(args.only, CHECKS[args.only], _tell) else FAILED
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with (args.out / "gpu_check.txt").open("w") as record:
        for name, command, environment in commands():
            shown, why = run(command, environment)
            lines = [*shown, f"FAIL {name}: {why}"] if why else shown
            for line in lines:
                _tell(line)
                record.write(f"{line}\n")
            failed += [name] if why or any(line.startswith("FAIL") for line in lines) else []
    _tell(f"failed: {', '.join(failed)}" if failed else "all is well")
    return FAILED if failed else 0


def run(command: list[str], environment: dict[str, str]) -> tuple[list[str], str]:
    """The lines that a check tells; and how it ended, where it did not end by itself."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with the ranks that it starts
    )
    late = ""
    try:
        out, complaints = process.communicate(timeout=PATIENCE)
    except BaseException as stopped:
        os.killpg(process.pid, signal.SIGKILL)
        out, complaints = process.communicate()
        if not isinstance(stopped, subprocess.TimeoutExpired):
            raise
        late = f"no end within {PATIENCE} s"
    lines = [line for line in out.splitlines() if line[:4] in ("OK  ", "FAIL", "    ")]
    if not late and process.returncode and not any(line.startswith("FAIL") for line in lines):
        return lines, f"ended with {process.returncode}: {complaints.strip()[-800:]}"
    return lines, late


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
