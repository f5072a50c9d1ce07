"""Scaling laws: loss of a dense language model by its parameters and training tokens.

L(N, D) = E + A / N^α + B / D^β, in nats per token of held-out text like that which the law was fitted on: runs of 70
million to 16 billion parameters on 5 to 500 billion tokens (Hoffmann et al., 2022, arXiv:2203.15556). Another data set,
tokenizer or architecture has other constants, so an answer is an order of magnitude and not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PlanError
from paceline.units import large

# tokens and parameters of the runs that both laws were fitted to
_FITTED_PARAMETERS, _FITTED_TOKENS = (70e6, 16e9), (5e9, 500e9)


@dataclass(frozen=True)
class ScalingLaw:
    """One published fit.

    Attributes:
        name: author and year.
        source: where the constants are printed.
        floor: E, the loss that no model falls below.
        a, alpha: of the term of the parameters.
        b, beta: of the term of the tokens.
    """

    name: str
    source: str
    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss after so many tokens, in nats per token."""
        return float(self.floor_of(parameters) + self.b / tokens**self.beta)

    def floor_of(self, parameters: float) -> float:
        """Loss of a model of that size after infinitely many tokens."""
        return float(self.floor + self.a / parameters**self.alpha)

    def tokens(self, parameters: float, loss: float) -> float:
        """Tokens after which a model reaches a loss.

        Raises:
            PlanError: the loss is at or below the floor of every model, or of this one.
        """
        if loss <= self.floor:
            raise PlanError(
                f"a loss of {loss:g} nats per token is not reached by any model: {self.name} ({self.source}) put the "
                f"floor at {self.floor:g} on their data. Name a loss above it, or --tokens"
            )
        if loss <= (least := self.floor_of(parameters)):
            enough = (self.a / (loss - self.floor)) ** (1 / self.alpha)
            raise PlanError(
                f"a model of {large(parameters)} parameters does not reach a loss of {loss:g} nats per token on any "
                f"number of tokens: its floor is {least:.3f} by {self.name} ({self.source}). A model needs more than "
                f"{large(enough)} parameters for it"
            )
        return float((self.b / (loss - least)) ** (1 / self.beta))


# The body of the paper prints rounded exponents (section 3.3, approach 3).
HOFFMANN = ScalingLaw("Hoffmann et al. (2022)", "arXiv:2203.15556", 1.69, 406.4, 410.7, 0.34, 0.28)
# The same runs, fitted again: the first fit had stopped early, and its rounding shifts predictions.
BESIROGLU = ScalingLaw("Besiroglu et al. (2024)", "arXiv:2404.10102", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)
LAWS = (BESIROGLU, HOFFMANN)


def extrapolated(parameters: float, tokens: float) -> str:
    """Sentence on what lies outside the runs of the fit; "" if nothing does."""
    outside = [
        f"{large(value)} {what}"
        for value, what, (least, most) in (
            (parameters, "parameters", _FITTED_PARAMETERS),
            (tokens, "tokens", _FITTED_TOKENS),
        )
        if not least <= value <= most
    ]
    return f"{' and '.join(outside)} lie outside the runs that the law was fitted to" if outside else ""
