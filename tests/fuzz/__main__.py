"""`python -m tests.fuzz --examples 500 --seed 1 --ranks 1`: goes on after a failure, and prints each failing case.

With `--graphs`: steps as random graphs (test_graphs.py) in place of steps as Python. With `--effects`: random effects
of the table under random optimizers (worlds.py); it ends with what became of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import slices, worlds
from tests.fuzz.plain import compare
from tests.fuzz.play import play
from tests.fuzz.strategies import cases, sketches
from tests.workers import Ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print each case before it runs")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--effects", action="store_true", help="effects and optimizers")
    parser.add_argument("--backend", default="aot_eager", help="of --effects")
    parser.add_argument("--graphs", action="store_true", help="graphs, which need no ranks")
    given_arguments = parser.parse_args()
    count, start = given_arguments.examples, time.monotonic()
    torch.set_num_threads(1)
    pair = Ranks(Path(tempfile.mkdtemp()))
    ran, failed = 0, 0
    became: Counter[str] = Counter()
    ranks, backend = given_arguments.ranks, given_arguments.backend
    drawn: Any = sketches() if given_arguments.graphs else cases(ranks=ranks)
    if given_arguments.effects:
        drawn = worlds.worlds(ranks=ranks, backend=backend)

    @seed(given_arguments.seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=drawn)
    def one(case: Any) -> None:
        nonlocal ran, failed
        ran += 1
        if given_arguments.verbose:
            print(f"{case!r},", flush=True)
        try:
            if given_arguments.graphs:
                slices.play(case)
            elif given_arguments.effects:
                torch.compiler.reset()
                both = (
                    pair(worlds.play, case, timeout=180.0) if ranks > 1 else [worlds.play(0, case)]
                )
                became[worlds.same(both)] += 1
            elif case.ranks == 1:
                torch.compiler.reset()
                compare(case, [play(0, case)])
            else:
                compare(case, pair(play, case, timeout=60.0))
        except Exception:
            failed += 1
            print(f"\nFAILED {case!r}\n{traceback.format_exc(limit=-8)}", flush=True)
        if ran % 10 == 0:
            took = time.monotonic() - start
            print(f"{ran} of {count} ran, {failed} failed, {took:.0f} s", flush=True)

    try:
        one()
    finally:
        pair.stop()
    print(f"{ran} ran, {failed} failed, seed {given_arguments.seed}")
    for what, times in became.most_common():
        print(f"{times:5} {what}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
