"""A Hugging Face classifier as it comes: the loss from `labels=`, a schedule that counts updates.

It learns from which package of Python's standard library a docstring is. BERT is small here and
starts from random weights; `--checkpoint` takes a pretrained one, a folder or a name that
transformers can load. Alone, or on two ranks:

    python examples/finetune_bert.py
    torchrun --nproc-per-node 2 examples/finetune_bert.py
"""

import re
from collections import Counter

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    get_linear_schedule_with_warmup,
)

import gradsync_fx
from launch import command_line, moved, ranks, replicated
from stdlib_text import docstrings


WINDOW = 4  # micro-steps
BATCH = 8  # docstrings in a micro-step
PACKAGES = ["asyncio", "email", "logging", "multiprocessing", "unittest", "xml"]


def train_step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def small_bert(texts: list[str], layers: int):
    """A tokenizer with the commonest words of the texts, and a BERT with random weights for it."""
    words = Counter(word for text in texts for word in re.findall(r"[a-z]+|[^\w\s]", text.lower()))
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w for w, _ in words.most_common(2000))]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(known)})
    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(known), "intermediate_size": 256, "num_labels": len(PACKAGES)}
    return tokenizer, BertForSequenceClassification(BertConfig(**sizes))


def encoded(tokenizer, pairs: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """One dictionary for each docstring, all of one length."""
    texts, labels = zip(*pairs, strict=True)
    size = {"padding": "max_length", "truncation": True, "max_length": 48}
    columns = tokenizer(list(texts), return_tensors="pt", **size)
    columns["labels"] = torch.tensor(labels)
    return [{name: column[i] for name, column in columns.items()} for i in range(len(pairs))]


@torch.no_grad()
def accuracy(net, batch: dict[str, Tensor]) -> float:
    net.eval()
    right = (net(**batch).logits.argmax(1) == batch["labels"]).float().mean().item()
    net.train()
    return right


def train(console: Console, rank: int, world: int, epochs: int, args) -> None:
    pairs = docstrings(PACKAGES)[: 1400 if args.quick else None]
    torch.manual_seed(0)  # the same weights on every rank
    if args.checkpoint:
        tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
        load = AutoModelForSequenceClassification.from_pretrained
        net = load(args.checkpoint, num_labels=len(PACKAGES))
    else:
        tokenizer, net = small_bert([text for text, _ in pairs], 1 if args.quick else 2)
    # Else BERT notes it down at its first call, and the second one would be traced anew.
    net.config.problem_type = "single_label_classification"
    examples = encoded(tokenizer, pairs)
    test = moved(next(iter(DataLoader(examples[:200], batch_size=200))))
    mine = examples[200 + rank :: world]
    loader = DataLoader(mine, batch_size=BATCH, shuffle=True, drop_last=True)
    updates = epochs * -(-len(loader) // WINDOW)

    model = replicated(net.train())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, updates // 10, updates)
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=WINDOW, backend=args.backend
    )
    torch.manual_seed(1 + rank)  # each rank shuffles its own share
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in loader:
            total += step(model, optimizer, moved(batch)).item()
            if step.sync_gradients:
                scheduler.step()
        step.flush(on_update=scheduler.step)
        result = f"loss {total / len(loader):.3f}, test accuracy {accuracy(net, test):.3f}"
        console.print(f"epoch {epoch}: {result}, {step.optimizer_step} of {updates} updates")


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a pretrained model to start from")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    with ranks() as (rank, world):
        console = Console(quiet=rank > 0, soft_wrap=True)
        train(console, rank, world, 5 if args.quick else 6, args)


if __name__ == "__main__":
    main()
