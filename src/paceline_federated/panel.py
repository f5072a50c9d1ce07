"""Charts of a federated run: clients, bytes, privacy and the spread of metrics over clients."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report import charts
from paceline.report.page import Chart
from paceline.report.run_page import PanelInfo
from paceline.report.run_record import RunRecord

PANEL = PanelInfo("paceline_federated.panel:panel")

_CLIENTS = {
    "clients": ("counted", charts.BLUE),
    "dropped": ("dropped out", charts.VERMILLION),
    "late": ("late", charts.OCHRE),
    "refused": ("refused", charts.GREEN),
}
_BYTES = {"down_bytes": ("to clients", charts.BLUE), "up_bytes": ("by clients", charts.VERMILLION)}
_SPREAD = {"best": charts.GREEN, "median": charts.BLUE, "worst": charts.VERMILLION}


def panel(record: RunRecord) -> Iterator[Chart]:
    """Return the charts of a federated run; other runs have none."""
    rounds = [step for step in record.ranks.get(0, []) if "chosen" in step]
    if not rounds:
        return
    numbers = [step["step"] for step in rounds]

    def lines_of(keys: dict[str, tuple[str, str]], unit: float = 1.0) -> list[charts.Line]:
        return [
            charts.Line(name, numbers, [step[key] / unit for step in rounds], colour)
            for key, (name, colour) in keys.items()
        ]

    label = "Clients of each round by how they answered."
    yield Chart("clients", charts.lines(lines_of(_CLIENTS), "rounds", "clients"), label, "Clients of each round")
    label = "Bytes of each round, in both directions."
    yield Chart("client-bytes", charts.lines(lines_of(_BYTES, 2**20), "rounds", "MiB"), label, "Bytes of each round")
    if "epsilon" in rounds[-1]:
        spent = charts.Line("ε", numbers, [step.get("epsilon", 0.0) for step in rounds])
        label = f"Privacy spent: ε is {rounds[-1]['epsilon']:.3g} now."
        yield Chart("privacy", charts.lines([spent], "rounds", "ε"), label, "Privacy spent")
    yield from _spread(record)


def _spread(record: RunRecord) -> Iterator[Chart]:
    measured = [event for event in record.events if event["event"] == "clients"]
    if measured:
        at = [event["step"] for event in measured]
        drawn = [
            charts.Line(k, at, [event[k] for event in measured], colour, marked=True) for k, colour in _SPREAD.items()
        ]
        metric = str(measured[-1]["metric"])
        label = f"{metric} of clients on samples of their own: best, median and worst."
        yield Chart("client-spread", charts.lines(drawn, "rounds", metric), label, f"Spread over clients: {metric}")
