"""A small GPT of the zoo in float64, whose losses hardly depend on the order of sums for thousands of steps."""

from torch import nn

from paceline.job.zoo.models import GPT

VOCAB, TOKENS = 32, 8


def build() -> nn.Module:
    """Build a model of 4 layers with about 14,000 parameters."""
    return GPT(vocab=VOCAB, context=TOKENS, layers=4, hidden=16, heads=4).double()
