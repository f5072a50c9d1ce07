"""Actor-learner reinforcement learning: actors in other processes play, the learner learns (REINFORCE).

Each actor has a copy of the policy and streams episodes; between two streams the learner pushes its weights. The game:
walk along a line to a goal that is shown, in as few steps as possible.

python actors.py
python actors.py --updates 5 --actors 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from serving_processes import serving
from torch import Tensor, nn
from torch.distributions import Categorical

import paceline_server as remote

LENGTH, EPISODES, GAMES = 16, 4, 32  # steps; episodes of a stream; games at a time in each


def make_policy() -> nn.Module:
    """Position and goal to the logits of a step to the left, none, and one to the right."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))


class Actor:
    """Plays with its copy of the policy."""

    def __init__(self, seed: int) -> None:
        self.policy = make_policy()
        self.random = torch.Generator().manual_seed(seed)

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Take the learner's weights."""
        self.policy.load_state_dict(weights)

    def episodes(self, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Observations, actions and rewards of games, of shape (steps, games)."""
        for _ in range(count):
            yield self._play()

    @torch.no_grad()
    def _play(self) -> tuple[Tensor, Tensor, Tensor]:
        place = torch.zeros(GAMES)
        goal = torch.randint(-4, 5, (GAMES,), generator=self.random).float()
        seen, actions, rewards = [], [], []
        for _ in range(LENGTH):
            seen.append(torch.stack([place / 4, goal / 4], dim=1))
            chances = self.policy(seen[-1]).softmax(1)
            actions.append(torch.multinomial(chances, 1, generator=self.random)[:, 0])
            place = place + actions[-1] - 1
            rewards.append(-(place - goal).abs() / 4)
        return torch.stack(seen), torch.stack(actions), torch.stack(rewards)


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, episodes: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """One update; returns the mean reward of a step."""
    seen, actions, rewards = (torch.cat(part, dim=1) for part in zip(*episodes, strict=True))
    to_come = rewards.flip(0).cumsum(0).flip(0)
    advantage = (to_come - to_come.mean(1, keepdim=True)) / (to_come.std(1, keepdim=True) + 1e-6)
    loss = -(Categorical(logits=policy(seen)).log_prob(actions) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


def main() -> None:
    """Train, and print the reward and the steps that all actors play in a second."""
    options = argparse.ArgumentParser()
    options.add_argument("--updates", type=int, default=60)
    options.add_argument("--actors", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(1)  # several processes share the cores
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    names, path = [f"actor-{n}" for n in range(args.actors)], f"{Path(__file__).resolve()}:Actor"
    with serving(names, [path]), ThreadPoolExecutor(args.actors) as pool:
        actors = [remote.create(name, path, seed=n) for n, name in enumerate(names)]

        def play(actor: remote.Reference) -> list[tuple[Tensor, Tensor, Tensor]]:
            actor.call("set_weights", dict(policy.state_dict()))
            return list(actor.stream("episodes", EPISODES))

        begin = time.perf_counter()
        for update in range(args.updates):
            episodes = [episode for played in pool.map(play, actors) for episode in played]
            reward = learn(policy, optimizer, episodes)
            if update % max(1, args.updates // 6) == 0 or update == args.updates - 1:
                print(f"update {update + 1}  reward a step {reward:.3f}")
        steps = args.updates * args.actors * EPISODES * GAMES * LENGTH
        print(f"{steps / (time.perf_counter() - begin):,.0f} steps/s of {args.actors} actors")


if __name__ == "__main__":
    main()
