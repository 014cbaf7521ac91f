"""The process of one rank: `rank.py TASK.json RANK`. Tells on stdout what it does; its result goes beside the task."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from measure import Ranks, Task, measure
from placement import Place


def main() -> None:
    file, rank = Path(sys.argv[1]), int(sys.argv[2])
    task = Task(**json.loads(file.read_text()))
    place = Place(**task.place)
    torch.set_num_threads(1)
    if place.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        place.backend, init_method=f"file://{task.store}", rank=rank, world_size=place.world,
        timeout=timedelta(minutes=15),  # a rank may wait while another one compiles
    )  # fmt: skip

    def tell(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    found = measure(task, Ranks(rank, place), tell)
    file.with_name(f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
