"""The same script under each launcher: the ranks' numbers are those of one process that has their data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launched import WINDOWS, K
from tests.scenarios.groups import joined


SCRIPT = Path(__file__).parent / "launched.py"
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "spawn": (),
    "accelerate": (),
}

pytestmark = [pytest.mark.gloo, pytest.mark.inductor, pytest.mark.captured]


def check(folder: Path) -> None:
    wanted = joined(0, 1, windows=WINDOWS, k=K)
    found = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    for one in found:
        assert one["updates"] == WINDOWS
        assert all(map(torch.equal, one["values"], found[0]["values"]))
        torch.testing.assert_close(one["values"], wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("how", LAUNCHERS)
def test_as_it_is(how: str, tmp_path: Path) -> None:
    command = [sys.executable, *LAUNCHERS[how], str(SCRIPT), how, str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=SCRIPT.parent.parent, check=False
    )
    assert ended.returncode == 0, ended.stderr
    check(tmp_path)


@pytest.mark.filterwarnings("default")  # Ray's own are not ours to mend
def test_ray_train(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is large, and not among the development tools")
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    root, folder = str(SCRIPT.parent.parent), str(tmp_path)

    def loop() -> None:
        sys.path.insert(0, root)
        from tests import launched

        launched.train(folder)

    ray.init(num_cpus=2, include_dashboard=False)
    try:
        TorchTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
        ).fit()
    finally:
        ray.shutdown()
    check(tmp_path)
