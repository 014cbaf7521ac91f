"""Short training scripts that accumulate gradients, each in a shape of its own. `model` is what they train.

A script under `if __name__ == "__main__"` leaves it as `model`, too.
"""

from __future__ import annotations


HEAD = """\
import contextlib
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
data = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(10)]
"""
MODEL = """\
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
"""

TAIL = f"""{HEAD}{MODEL}
accumulation_steps = 4
running = 0.0
for epoch in range(2):
    model.train()
    for i, (inputs, targets) in enumerate(data):
        outputs = model(inputs)
        loss = F.mse_loss(outputs, targets)
        running += loss.item()
        loss = loss / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(data):
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print("updated", epoch, i)
print(f"{{running:.4f}}")
"""

WHOLE = f"""{HEAD}{MODEL}
losses = []
for step, (x, y) in enumerate(data[:8], start=1):
    x = x + 1
    loss = F.mse_loss(model(x), y)
    (loss / 4).backward()
    losses.append(round(loss.item(), 3))
    if step % 4 == 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad()
        scheduler.step()
        print(step, round(norm.item(), 2))
print(losses)
"""

CARRIED = f"""{HEAD}{MODEL}
k = 4
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), y) / k
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
optimizer.zero_grad()
"""

DROPPED = f"""{HEAD}{MODEL}
for epoch in range(3):
    optimizer.zero_grad()
    for i, batch in enumerate(data):
        x, y = batch
        with torch.autocast("cpu", enabled=False):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
"""

INNER = f"""{HEAD}
def get_batch():
    return torch.randn(4, 8), torch.randn(4, 2)


def rate_at(update):
    return 0.01 / (update + 1)


{MODEL}
gradient_accumulation_steps = 4
ddp = False
grad_clip = 1.0
scaler = torch.amp.GradScaler("cpu", enabled=False)
ctx = contextlib.nullcontext()
update = 0
X, Y = get_batch()
while True:
    for group in optimizer.param_groups:
        group["lr"] = rate_at(update)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            loss = F.mse_loss(model(X), Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()  # the next one, while the device is busy
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(update, round(loss.item() * gradient_accumulation_steps, 4))
    update += 1
    if update == 3:
        break
"""

ZEROED_FIRST = f"""{HEAD}

def main():
    model = nn.Linear(8, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(data)
    for update in range(2):
        opt.zero_grad()
        total = 0.0
        for _ in range(4):
            x, y = next(batches)
            loss = F.mse_loss(model(x), y)
            total += loss.item() / 4
            (loss / 4).backward()
        opt.step()
        print(update, round(total, 4))
    return model


if __name__ == "__main__":
    model = main()
"""

ACCELERATE = """\
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 2)), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    updates = 0
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates += 1
    accelerator.print(updates, round(loss.item(), 4))
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    model = main()
"""

DDP_HEAD = f"""{HEAD}
import sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
data = data[rank::2]
ddp_model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
k = 2
"""
DDP_TAIL = """\
model = ddp_model.module
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""

DDP_CONTEXT = f"""{DDP_HEAD}
for epoch in range(2):
    for i, (x, y) in enumerate(data):
        last = (i + 1) % k == 0 or i + 1 == len(data)
        sync = contextlib.nullcontext() if last else ddp_model.no_sync()
        with sync:
            loss = F.mse_loss(ddp_model(x), y) / k
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print("update", i)
{DDP_TAIL}"""

DDP_BRANCHES = f"""{DDP_HEAD}
for i, (x, y) in enumerate(data[:4]):
    if (i + 1) % k != 0:
        with ddp_model.no_sync():
            loss = F.mse_loss(ddp_model(x), y)
            loss.backward()
    else:
        loss = F.mse_loss(ddp_model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
{DDP_TAIL}"""

ALONE = {
    "tail": TAIL,
    "whole": WHOLE,
    "carried": CARRIED,
    "dropped": DROPPED,
    "inner": INNER,
    "zeroed first": ZEROED_FIRST,
    "accelerate": ACCELERATE,
}
ON_TWO_RANKS = {"context": DDP_CONTEXT, "branches": DDP_BRANCHES}
