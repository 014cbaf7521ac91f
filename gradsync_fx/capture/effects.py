"""Every effect that a step can have beside its result, with its rule: the table of docs/effects.md.

A rule says how often an effect happens in a window of k micro-steps, by what it depends on and what it changes:

every call          what depends on this call's data: the k micro-steps of a window each have theirs
once per update     what depends on gradients or on updated parameters, what a parameter becomes of itself alone, and
                    counts that only such effects read
once per window     what takes gradients away
after the program   calls that touch nothing that is computed with: they run after it, on every call, with its numbers
eagerly             nothing that a program could hold: refused with its line, or the step runs uncompiled
refused             by name, either way

An update without a micro-step (`flush`, `skip` in a last slot: the tail) has effects of the second and third kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """How often an effect happens, or that it does not."""

    EVERY_CALL = "every call"
    PER_UPDATE = "once per update"
    PER_WINDOW = "once per window"
    AFTER = "after the program"
    EAGERLY = "eagerly"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row. example: code of a step. note: what a reader would ask next."""

    name: str
    example: str
    rule: Rule
    note: str = ""


EFFECTS = (
    # Tensors that are written.
    Effect("buffer from data", "`self.mean.lerp_(x.mean(0), 0.1)`, BatchNorm", Rule.EVERY_CALL),
    Effect(
        "buffer from gradients",
        "`self.noise.copy_(p.grad.square().mean())`",
        Rule.PER_UPDATE,
        "with the window's gradients",
    ),
    Effect(
        "parameter from data",
        "`self.codes.lerp_(x.mean(0), 0.1)`, initialisation in the first forward",
        Rule.EVERY_CALL,
        "later micro-steps of the window compute with what it wrote",
    ),
    Effect("parameter from itself", "`p.mul_(0.99)`, `p.clamp_(-1, 1)`", Rule.PER_UPDATE),
    Effect(
        "write past autograd",
        "`p.data.clamp_(-1, 1)`, `p.detach().mul_(0.99)`",
        Rule.PER_UPDATE,
        "like the same write under `torch.no_grad()`, whatever rule that has",
    ),
    Effect(
        "average of the weights", "`slow.lerp_(p, 0.1)` after `optimizer.step()`", Rule.PER_UPDATE
    ),
    Effect(
        "tensor in another's place",
        "`self.average = 0.9 * self.average + 0.1 * p`, `self.norm = clip_grad_norm_(...)`",
        Rule.PER_UPDATE,
        "until then the old tensor stays, in an attribute, a dictionary or a list; one that is made of the call's data "
        "is put there in every call",
    ),
    Effect("renormed embedding", "`nn.Embedding(..., max_norm=1.0)`", Rule.EVERY_CALL),
    Effect("input", "`x.mul_(2)`", Rule.EVERY_CALL),
    Effect("tensor outside of the model", "`self.total += loss.detach()`", Rule.EVERY_CALL),
    Effect(
        "gradient of an input", "`x.requires_grad_()`, `x.grad` after the call", Rule.EVERY_CALL
    ),
    # Gradients.
    Effect("clipping", "`clip_grad_norm_(...)`", Rule.PER_UPDATE, "of the window's gradients"),
    Effect("gradients changed", "`p.grad.mul_(0.5)`, `p.grad = p.grad.sign()`", Rule.PER_UPDATE),
    Effect(
        "gradients that are values",
        "`p.grad = torch.func.grad(...)(...)`",
        Rule.EVERY_CALL,
        "added to the window's sum, like those of `backward`",
    ),
    Effect("gradients taken away", "`optimizer.zero_grad()`, `p.grad = None`", Rule.PER_WINDOW),
    Effect(
        "zero_grad of one's own",
        "`def zero_grad(self): super().zero_grad(); self.cleared += 1`",
        Rule.PER_UPDATE,
        "after the update, as a scheduler; one that reads gradients is refused",
    ),
    Effect(
        "hook on a parameter",
        "`p.register_hook(...)`",
        Rule.REFUSED,
        "do its work between `backward()` and `optimizer.step()`",
    ),
    # The update.
    Effect("update", "`optimizer.step()`", Rule.PER_UPDATE),
    Effect(
        "update that no trace sees",
        "an optimizer with `self.t += 1`",
        Rule.PER_UPDATE,
        "the optimizer's own `step()` runs as it is",
    ),
    Effect("hook of the update", "`optimizer.register_step_post_hook(...)`", Rule.PER_UPDATE),
    Effect("scheduler", "`scheduler.step()`", Rule.PER_UPDATE),
    Effect(
        "setting of the optimizer",
        '`group["lr"] = 0.05`',
        Rule.EAGERLY,
        "set it between calls, or by a scheduler",
    ),
    Effect(
        "scaled backward",
        "`GradScaler` that is enabled",
        Rule.REFUSED,
        "use bfloat16, or `skip_nonfinite=True`",
    ),
    # Random numbers.
    Effect("random numbers of forward", "`F.dropout(x)`, `torch.randn_like(x)`", Rule.EVERY_CALL),
    Effect("noise in gradients", "`p.grad.add_(torch.randn_like(p))`", Rule.PER_UPDATE),
    # Python.
    Effect("number of the step", "`self.calls += 1`", Rule.EVERY_CALL),
    Effect(
        "number of the update",
        "`self.count += 1`, which an average's decay is made of, or which a branch after the update reads",
        Rule.PER_UPDATE,
        "an attribute of an object; in a dictionary or a list it is refused, and where the step runs eagerly it has to "
        "be a tensor",
    ),
    Effect(
        "tensor that counts updates",
        "`self.count.add_(1)`, which an average's decay is made of",
        Rule.PER_UPDATE,
        "one that nothing reads, or that forward reads, changes in every call",
    ),
    Effect("list", "`losses.append(loss.item())`", Rule.AFTER),
    Effect("output", "`print(...)`, `logger.info(...)`", Rule.AFTER),
    Effect("metric", "`metric.update(out.detach())`, `bar.update(1)`", Rule.AFTER),
    Effect("gradients asked for or not", "`net.requires_grad_(False)`", Rule.EAGERLY),
    Effect("branch on a value", "`if loss.item() > 3:`", Rule.EAGERLY),
    Effect(
        "helper that cannot be traced",
        "a call that reaches a gradient, a parameter, the optimizer or a random generator",
        Rule.EAGERLY,
    ),
    # Other ranks.
    Effect("collective of data", "`dist.all_reduce(correct)`, gathered features", Rule.EVERY_CALL),
    Effect(
        "collective of gradients", "`dist.all_reduce(p.grad)`, an averaged norm", Rule.PER_UPDATE
    ),
)
