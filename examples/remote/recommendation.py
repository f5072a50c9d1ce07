"""Recommendation with a table in two other processes, and a dense model in this one.

Each of two processes holds every second row of the table of items, and steps the rows that were read. On hosts of
their own they would be started there by `paceline serve`, and this script would connect to their addresses.

python recommendation.py
python recommendation.py --steps 20 --items 1000
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from serving_processes import serving
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import paceline_server as remote

SHARDS, WIDTH, BATCH = 2, 16, 512


def table(rows: int) -> nn.Embedding:
    """One shard of the table, with sparse gradients."""
    return nn.Embedding(rows, WIDTH, sparse=True)


class ShardedTable(nn.Module):
    """Rows of items, of which each shard holds every n-th; lookups go to all shards at the same time."""

    def __init__(self, hosts: list[str], items: int) -> None:
        super().__init__()
        path = f"{Path(__file__).resolve()}:table"
        rows = -(-items // len(hosts))
        self.shards = [remote.module(host, path, rows, seed=n) for n, host in enumerate(hosts)]
        self.modules_there = nn.ModuleList(self.shards)

    def forward(self, items: Tensor) -> Tensor:
        """Shape (samples, width)."""
        chosen = [items % len(self.shards) == n for n in range(len(self.shards))]
        pending = [
            shard.begin(items[mine] // len(self.shards)) for shard, mine in zip(self.shards, chosen, strict=True)
        ]
        out = torch.zeros(len(items), WIDTH)
        for mine, answer in zip(chosen, pending, strict=True):
            out = out.masked_scatter(mine[:, None], answer.result())
        return out


@dataclass
class Ratings:
    """Synthetic data: users like items whose hidden taste is like their own."""

    items: int

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.taste = torch.randn(self.items, 4, generator=draw)

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Items, users' features, and whether they like them."""
        draw = torch.Generator().manual_seed(1 + number)
        items = torch.randint(self.items, (BATCH,), generator=draw)
        users = torch.randn(BATCH, 4, generator=draw)
        return items, users, ((users * self.taste[items]).sum(1) > 0).float()


def main() -> None:
    """Train, and print the loss, the accuracy, and rows a second."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--items", type=int, default=2000)
    args = options.parse_args()
    torch.set_num_threads(1)  # several processes share the cores
    torch.manual_seed(0)
    names = [f"shard-{n}" for n in range(SHARDS)]
    with serving(names, [f"{Path(__file__).resolve()}:table"]):
        items = ShardedTable(names, args.items)
        users = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        of_items = remote.optimizer(items.shards, "adagrad", lr=0.3)
        of_users = torch.optim.Adam(users.parameters(), lr=0.01)
        ratings, begin = Ratings(args.items), time.perf_counter()
        for step in range(args.steps):
            rows, x, likes = ratings.batch(step)
            scores = (items(rows) * users(x)).sum(1)
            loss = binary_cross_entropy_with_logits(scores, likes)
            of_users.zero_grad()
            loss.backward()
            of_users.step()
            of_items.step()
            if step % max(1, args.steps // 5) == 0 or step == args.steps - 1:
                right = ((scores > 0) == (likes > 0)).float().mean().item()
                print(f"step {step + 1}  loss {loss.item():.4f}  right {right:.3f}")
        took_s = time.perf_counter() - begin
        print(f"{args.steps * BATCH / took_s:,.0f} rows/s over {SHARDS} shards of {-(-args.items // SHARDS):,} rows")


if __name__ == "__main__":
    main()
