"""Hugging Face's Trainer on top of `optimize`: its loop and its numbers, one reduction and one update per window.

trainer = GradSyncTrainer(model, args, train_dataset=data)       args.gradient_accumulation_steps is k
trainer.train()

Who does what in a window of n micro-batches (n = k; fewer at the end of an epoch):

Trainer    batches, num_items_in_batch, the loss: a sum over tokens / num_items_in_batch, or a mean / n; lr scheduler,
           logs, evaluation, checkpoints, at the boundary
the step   forward, backward, the sum of the micro-gradients, its mean over the ranks, clipping, update

So each token weighs the same as in Trainer's own loop: its count divides the loss of every micro-batch already, and
the window is a plain sum (`reduction="sum"`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from gradsync_fx.api import optimize
from gradsync_fx.errors import OptionError
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.user_lines import warn_user


_DECIDED = ("gradient_accumulation_steps", "reduction")


class GradSyncTrainerMixin:
    """Put before a Trainer's class, it trains through `optimize`: `class Mine(GradSyncTrainerMixin, Seq2SeqTrainer)`.

    gradsync_options: keyword arguments of `gradsync_fx.optimize`, but for those that TrainingArguments decide. All
    other arguments are the Trainer's. `compute_loss`, `compute_loss_func` and label smoothing count as they do there;
    `compute_loss` is traced. Callbacks see no gradients: the update is over when `on_pre_optimizer_step` is called.

    Raises `OptionError` for arguments that make another kind of training of it (fp16, DeepSpeed, FSDP, more than one
    GPU in a process, torch_compile).
    """

    args: Any
    accelerator: Any
    optimizer: Any
    current_gradient_accumulation_steps: int

    def __init__(
        self, *args: Any, gradsync_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(gradsync_options or {})
        for name in _DECIDED:
            if name in self._options:
                raise OptionError(
                    f"gradsync_options[{name!r}]",
                    seen="it is given twice: Trainer decides it",
                    wanted="options that TrainingArguments do not have",
                    fix="set gradient_accumulation_steps in TrainingArguments",
                )
        _check(self)
        self._trained: tuple[Any, Any] = (None, None)
        self.gradsync_step: OptimizedStep | None = None
        self._norm: Tensor | None = None
        self._n = 0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`."""
        self.gradsync_step = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._drop_leftovers()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, which it calls when a window begins."""
        self._drop_leftovers()
        return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _drop_leftovers(self) -> None:
        """A callback may end an epoch inside a window: nothing of it goes into the next."""
        if self.gradsync_step is not None and self.gradsync_step.pending:
            self.gradsync_step.discard()

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One micro-step; in the last of a window also the reduction, the clipping and the update."""
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        step, n = self._step_of(model), self.current_gradient_accumulation_steps
        if not step.pending and n != self._n:
            step.set_gradient_accumulation_steps(n)
            self._n = n
        loss, self._norm = step(
            model,
            self._prepare_inputs(inputs),  # type: ignore[attr-defined]
            num_items_in_batch,
            torch.tensor(float(n), device=self.args.device),
        )
        if step.sync_gradients:
            if not self.accelerator.sync_gradients:
                warn_user(
                    f"the data ended inside a window: its {n} micro-batches made an update that Trainer does not count"
                )
            # The loop's own optimizer.step() is Accelerate's, which this closes: the update has been made.
            self.accelerator.gradient_state.sync_gradients = False
        return loss

    def _step_of(self, model: nn.Module) -> OptimizedStep:
        """The step for what Trainer prepared; another one when it prepared anew."""
        if self.gradsync_step is None or self._trained != (model, self.optimizer):
            self._trained = (model, self.optimizer)
            sync_each_batch = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
            options = {"sync_each_batch": bool(sync_each_batch), **self._options}
            self._n = self.args.gradient_accumulation_steps
            self.gradsync_step = optimize(
                self._micro_step,
                gradient_accumulation_steps=self._n,
                reduction="sum",
                **options,
            )
        return self.gradsync_step

    def _micro_step(
        self, model: nn.Module, inputs: dict[str, Any], items: Tensor | int | None, n: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)  # type: ignore[attr-defined]
        if not self._divided(items):
            loss = loss / n
        loss.backward()
        limit = self.args.max_grad_norm
        norm = clip_grad_norm_(model.parameters(), limit if limit > 0 else float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _divided(self, items: Tensor | int | None) -> bool:
        """Whether the loss is a part of the window's already: what Trainer asks before it divides by n."""
        told: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        counted = self.model_accepts_loss_kwargs and items is not None  # type: ignore[attr-defined]
        return counted or self.compute_loss_func is not None  # type: ignore[attr-defined]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        """The norm before clipping, which was part of the update."""
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm if grad_norm is None else grad_norm


class GradSyncTrainer(GradSyncTrainerMixin, Trainer):
    """`transformers.Trainer` that trains through `gradsync_fx.optimize`; see the mixin for its one argument more."""


def _check(trainer: Any) -> None:
    args = trainer.args
    refused = {
        "fp16=True": args.fp16,
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": trainer.is_fsdp_enabled,
        "more than one GPU in a process": args.n_gpu > 1,
        "torch_compile=True": args.torch_compile,
        "a parallelism_config": getattr(trainer.accelerator, "parallelism_config", None),
    }
    for name, found in refused.items():
        if found:
            raise OptionError(
                f"TrainingArguments: {name}",
                seen="a training that is not the Trainer's own data parallelism",
                wanted="one device for each process, whole copies of the model, float32 or bf16=True",
                fix="leave it out, or use transformers.Trainer",
            )
    below = super(GradSyncTrainerMixin, trainer)
    for name in ("training_step", "compute_loss_context_manager"):
        found = getattr(below, name).__func__
        if found is not getattr(Trainer, name):
            raise OptionError(
                found.__qualname__,
                seen="it is overridden, and the step that is traced would go without it",
                wanted="a Trainer whose step is a loss, its backward and its update",
                fix="override compute_loss instead; it is traced",
            )
