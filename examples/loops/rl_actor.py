"""Reinforcement learning with actors that make their own data.

Each rank plays its part of the episodes of an update (REINFORCE).

python rl_actor.py
torchrun --nproc-per-node 2 rl_actor.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

import paceline

LENGTH, UPDATES = 60, 12  # steps of an episode at most; updates


class Episodes(IterableDataset[int]):
    """The stream that is dealt to the actors: the number of each episode, from which its randomness follows."""

    def __iter__(self) -> Iterator[int]:
        yield from count()


class Carts:
    """A pole on a cart for each episode (the equations of Barto, Sutton and Anderson, 1983)."""

    def __init__(self, episodes: Tensor) -> None:
        draws = [torch.rand(4 + LENGTH, generator=torch.Generator().manual_seed(int(number))) for number in episodes]
        self.random = torch.stack(draws) if draws else torch.zeros(0, 4 + LENGTH)
        self.state = 0.1 * self.random[:, :4] - 0.05

    def push(self, right: Tensor) -> Tensor:
        """Push each cart to the right or to the left for 0.02 s; returns which poles stand."""
        speed, angle, turning = self.state[:, 1:].unbind(1)
        force = torch.where(right, 10.0, -10.0)
        pushed = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        falling = (9.8 * angle.sin() - angle.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        driving = pushed - 0.05 * falling * angle.cos() / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, driving, turning, falling], dim=1)
        return (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.21)


def play(policy: nn.Module, episodes: Tensor) -> tuple[Tensor, Tensor]:
    """Play these episodes.

    Returns the log-probability of what was done in each step, and the reward to come, both (episodes, steps).
    """
    carts, stands, chosen, rewards = Carts(episodes), torch.ones(len(episodes), dtype=torch.bool), [], []
    for step in range(LENGTH):
        actions = Categorical(logits=policy(carts.state))
        right = carts.random[:, 4 + step] < actions.probs[:, 1]
        chosen.append(actions.log_prob(right.long()) * stands)
        stands = stands & carts.push(right)
        rewards.append(stands.float())
    to_come = torch.stack(rewards, dim=1).flip(1).cumsum(1).flip(1)
    return torch.stack(chosen, dim=1), to_come


def main() -> None:
    """Make some updates, each from 32 episodes over all ranks."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    engine = paceline.setup(policy, optimizer, loader=DataLoader(Episodes(), batch_size=32))
    for update, episodes in zip(range(UPDATES), engine.loader, strict=False):
        chosen, to_come = play(policy, episodes)
        stood = engine.mean(to_come[:, 0].mean())
        baseline = engine.mean(to_come.mean())
        engine.backward(-(chosen * (to_come - baseline)).mean())
        result = engine.update(clip_norm=5.0)
        engine.print(f"update {update + 1}  loss {result.loss:.5f}  steps that the pole stood {stood:.3f}")


if __name__ == "__main__":
    main()
