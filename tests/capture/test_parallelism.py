"""What is parallel in another way than by data is refused by name at the first call, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios import parallel
from tests.test_ranks_disagreement import check_both
from tests.workers import Ranks


pytestmark = pytest.mark.gloo

NAMED = {
    "fully_shard": "module 'model': fully_shard",
    "fully_shard of a part": "module 'model.1': fully_shard",
    "FullyShardedDataParallel": "module 'model': FullyShardedDataParallel",
    "tensor parallel": "tensor 'model.0.weight': a DTensor",
    "pipeline": "ScheduleGPipe 'model': a pipeline",
}


@pytest.mark.parametrize(
    "options",
    [{}, {"on_unsupported": "eager"}, {"self_check": True}],
    ids=["error", "eager", "check"],
)
@pytest.mark.parametrize("how", list(NAMED))
def test_refused_by_name(ranks: Ranks, how: str, options: dict[str, Any]) -> None:
    errors = ranks(parallel.refused, how, options)
    check_both(errors, "ParallelismError", NAMED[how])
    assert [error["calls"] for error in errors] == [0, 0]
