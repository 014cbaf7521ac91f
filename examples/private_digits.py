"""Differentially private training: each sample's gradient clipped by itself, and noise once for each update.

The gradients are values of torch.func, assigned to `.grad`, and are summed over a window and over
the ranks like those of backward(). Alone, or on two ranks:

    python examples/private_digits.py
    torchrun --nproc-per-node 2 examples/private_digits.py
"""

import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import gradsync_fx
from launch import command_line, moved, ranks, replicated


WINDOW = 4  # micro-steps
BATCH = 16  # digits in a micro-step
CLIP = 1.0  # the largest norm of a sample's gradient
NOISE = 0.01  # standard deviation of what is added to the mean of these
TEST = 360  # digits held out


def clipped(net: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The mean of the samples' gradients, none of them longer than CLIP."""

    def loss_of(parameters, image, label):
        scores = functional_call(net, parameters, (image[None],))
        return F.cross_entropy(scores, label[None])

    parameters = {name: p.detach() for name, p in net.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, images, labels)
    squares = [g.flatten(1).square().sum(1) for g in each.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = (CLIP / norms.clamp(min=1e-6)).clamp(max=1.0) / len(images)
    return {name: torch.einsum("i,i...->...", scale, g) for name, g in each.items()}


def train_step(model, optimizer, images, labels):
    net = getattr(model, "module", model)
    grads = clipped(net, images, labels)
    for name, p in net.named_parameters():
        p.grad = grads[name]
    for p in net.parameters():  # from here on .grad is the window's, of all ranks: one noise for it
        p.grad.add_(torch.randn_like(p), alpha=NOISE)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (net(images).argmax(1) == labels).float().mean().item()


def train(console: Console, rank: int, world: int, epochs: int, backend: str) -> None:
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    mine = TensorDataset(images[TEST + rank :: world], labels[TEST + rank :: world])
    torch.manual_seed(0)  # the same weights on every rank, and the same noise
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    model = replicated(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=WINDOW, backend=backend)
    order = torch.Generator().manual_seed(1 + rank)  # each rank shuffles its own share
    loader = DataLoader(mine, batch_size=BATCH, shuffle=True, drop_last=True, generator=order)
    for epoch in range(1, epochs + 1):
        for batch in loader:
            step(model, optimizer, *moved(batch))
        step.flush()
        right = accuracy(net, *moved((images[:TEST], labels[:TEST])))
        console.print(
            f"epoch {epoch}: test accuracy {right:.3f} after {step.optimizer_step} updates"
        )


def main() -> None:
    args = command_line(__doc__.splitlines()[0]).parse_args()
    with ranks() as (rank, world):
        console = Console(quiet=rank > 0, soft_wrap=True)
        train(console, rank, world, 2 if args.quick else 8, args.backend)


if __name__ == "__main__":
    main()
