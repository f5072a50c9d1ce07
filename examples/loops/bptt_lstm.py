"""Truncated backpropagation through time: an LSTM reads long sequences in pieces and keeps its state between updates.

python bptt_lstm.py
torchrun --nproc-per-node 2 bptt_lstm.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

LETTERS, PIECE = 12, 20
State = tuple[Tensor, Tensor] | None


class Reader(nn.Module):
    """A language model of one LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(LETTERS, 24), nn.LSTM(24, 48, batch_first=True)
        self.head = nn.Linear(48, LETTERS)

    def forward(self, letters: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.embed(letters), state)
        return self.head(hidden), state


def texts(count: int, length: int) -> Tensor:
    """Sequences in which each letter follows from the one three places before, with some noise."""
    found = torch.randint(LETTERS, (count, length))
    for i in range(3, length):
        found[:, i] = torch.where(torch.rand(count) < 0.9, (found[:, i - 3] + 1) % LETTERS, found[:, i])
    return found


def main() -> None:
    """Train for two epochs."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(texts(64, 101)), batch_size=16, shuffle=True)

    engine = paceline.setup(model, optimizer, loader=loader)
    for epoch in range(2):
        losses = []
        for (letters,) in engine.loader:
            state: State = None
            for begin in range(0, letters.shape[1] - 1, PIECE):
                read, following = letters[:, begin : begin + PIECE], letters[:, begin + 1 : begin + PIECE + 1]
                logits, state = model(read, state)
                assert state is not None
                state = (state[0].detach(), state[1].detach())  # the gradient ends here, the memory does not
                engine.backward(F.cross_entropy(logits.transpose(1, 2), following))
                losses.append(engine.update(clip_norm=1.0).loss)
        engine.print(
            f"epoch {epoch + 1}  first {losses[0]:.5f}  last {losses[-1]:.5f}  mean {sum(losses) / len(losses):.5f}"
        )


if __name__ == "__main__":
    main()
