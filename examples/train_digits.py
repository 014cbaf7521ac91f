"""A convnet with BatchNorm on epochs that end inside a window: `flush` applies what is left.

The data are the handwritten digits that ship with scikit-learn. Alone, or on two ranks:

    python examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py
"""

import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync_fx
from launch import command_line, moved, ranks, replicated


WINDOW = 4  # micro-steps
BATCH = 24  # digits in a micro-step
TEST = 360  # digits held out


def train_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    scores = model(images)
    loss = F.cross_entropy(scores, labels)
    loss.backward()
    optimizer.step()
    return loss, (scores.argmax(1) == labels).sum()


def convnet(width: int) -> nn.Module:
    def layer(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *layer(1, width), *layer(width, 2 * width), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(2 * width * 16, 10),
    )  # fmt: skip


def digits() -> tuple[Tensor, Tensor]:
    """Images of 8 by 8 values between 0 and 1, and the digit on each."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target)


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    right = (net(images).argmax(1) == labels).float().mean().item()
    net.train()
    return right


def train(console: Console, rank: int, world: int, epochs: int, backend: str, width: int) -> None:
    images, labels = digits()
    test = moved((images[:TEST], labels[:TEST]))
    mine = TensorDataset(images[TEST + rank :: world], labels[TEST + rank :: world])
    torch.manual_seed(0)  # the same weights on every rank
    net = convnet(width)
    model = replicated(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=WINDOW, backend=backend)

    torch.manual_seed(1 + rank)  # each rank shuffles its own share
    for epoch in range(1, epochs + 1):
        # Whole batches only: a shorter one at the end would be traced for its own size.
        loader = DataLoader(mine, batch_size=BATCH, shuffle=True, drop_last=True)
        right = 0
        for batch in loader:
            loss, hits = step(model, optimizer, *moved(batch))
            right += hits.item()
        left = step.pending
        step.flush()
        console.print(
            f"epoch {epoch}: loss {loss:.3f}, training accuracy {right / len(loader) / BATCH:.3f}, "
            f"test accuracy {accuracy(net, *test):.3f}; "
            f"{step.optimizer_step} updates, the last of {left or WINDOW} micro-steps"
        )


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    args = parser.parse_args()
    with ranks() as (rank, world):
        console = Console(quiet=rank > 0, soft_wrap=True)
        epochs, width = (2, 4) if args.quick else (8, 16)
        train(console, rank, world, epochs, args.backend, width)


if __name__ == "__main__":
    main()
