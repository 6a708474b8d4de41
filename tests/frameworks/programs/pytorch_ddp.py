"""Trains a linear model with DistributedDataParallel on CPUs. Every rank starts with other weights and has other data."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    inputs = torch.randn(32, 4)
    loss = ((model(inputs) - inputs.sum(dim=1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = [round(w, 5) for p in model.parameters() for w in p.detach().flatten().tolist()]
print(f"RESULT rank={dist.get_rank()} size={dist.get_world_size()} weights={weights}", flush=True)
dist.destroy_process_group()
