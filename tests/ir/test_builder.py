"""A finished program holds what its lasting effects need, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from gradsync_fx.ir.program import Kind
from tests.drive import plain_step, quick
from tests.reference import regression


def test_the_tail_of_a_model_with_dropout_needs_no_data() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = quick(plain_step, 3)
    run(model, optimizer, *regression(1, 1)[0][0])
    start = model[0].weight.detach().clone()
    run.flush()
    assert run.sync_gradients
    assert not torch.equal(model[0].weight, start)
    (captured,) = run._executor.catalogue.captures
    tail = captured.programs.by_name["tail"]
    assert {slot.kind for slot in tail.slots} == {Kind.PARAMETER, Kind.ACCUMULATOR, Kind.SCALAR}
