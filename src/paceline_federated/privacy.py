"""Privacy spent by a federated run, by opacus' accountant of Gaussian noise under Poisson sampling."""

from __future__ import annotations

import warnings

from paceline.errors import JobError
from paceline_federated.section import PrivacySpec


class PrivacySpent:
    """Counts the server's steps on noised sums, and tells ε.

    Args:
        rate: probability with which each client is chosen, independently of the others, in each round.

    Raises:
        JobError: opacus is not installed.
    """

    def __init__(self, spec: PrivacySpec, rate: float) -> None:
        try:
            from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise JobError(
                "federate.privacy needs opacus, whose accountant tells what privacy is spent: "
                "pip install 'paceline[federate]', or leave privacy out"
            ) from error
        self.spec, self.rate, self.rounds = spec, rate, 0
        self._accountant = RDPAccountant

    def step(self) -> None:
        """Count one noised sum."""
        self.rounds += 1

    @property
    def epsilon(self) -> float:
        """ε of all rounds so far, for the job's δ; 0 before the first."""
        if not self.rounds:
            return 0.0
        accountant = self._accountant()
        accountant.history = [(self.spec.noise, self.rate, self.rounds)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an order at the end of its range: the bound is then a loose one
            return float(accountant.get_epsilon(delta=self.spec.delta))
