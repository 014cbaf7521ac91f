"""Refuses the dropout of recurrent layers (LSTM, GRU, RNN); all else of them is traced as what they compute."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradsync_fx.capture.trace_state import refuse


def refuse_dropout(tx: Any, module: nn.Module, attribute: str) -> None:
    """Ends the trace where a recurrent layer that trains reads its dropout, before it draws masks."""
    if attribute != "dropout" or not isinstance(module, nn.RNNBase):
        return
    if module.training and module.dropout and module.num_layers > 1:
        name = type(module).__name__
        refuse(
            tx,
            f"nn.{name}(dropout={module.dropout})",
            seen="in a graph it draws other masks than in plain PyTorch, from the same seed",
            wanted="recurrent layers without dropout of their own",
            fix=f'stack nn.{name} layers with nn.Dropout between them; or pass on_unsupported="eager"',
        )
