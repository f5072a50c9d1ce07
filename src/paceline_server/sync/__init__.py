"""The sync rule `server`: replicas that push to parameter servers.

`SERVER` describes the rule without importing torch; `server.py` implements the forms of the rule. If servers own the
parameters, the training loop of the workers is in `paceline_server/training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.planning.sync_info import (
    OUTER_LR,
    OUTER_MOMENTUM,
    Argument,
    ServerProcesses,
    SyncInfo,
    one_of,
    whole,
    whole_or_inf,
)


def _check(arguments: Mapping[str, Any]) -> str | None:
    if arguments["period"] == 1 and (arguments["lr"], arguments["momentum"]) != (
        OUTER_LR.default,
        OUTER_MOMENTUM.default,
    ):
        return "lr and momentum belong to the outer optimizer, which needs a period of 2 or more"
    if not arguments["staleness"] and arguments["backup"] == "off":
        return "backup=off needs a staleness of 1 or more; other servers keep no state, and have no backup"
    return None


def _variants(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return descriptions of the rule with a period, with a staleness, and with both."""
    found: dict[str, Any] = {}
    if arguments["period"] > 1:
        found |= {
            "rule": "paceline_server.sync.server:ServerDeltas",
            "exact": False,
            "every_step": False,
            "sends": "deltas",
            "period": "period",
            "needs_inner": True,
        }
    if arguments["staleness"]:
        found |= {
            "rule": "paceline_server.sync.server:ServedDeltas" if found else "paceline_server.sync.server:Served",
            "exact": False,
            "every_step": False,
            "served": True,
            "run_rank": "paceline_server.training.run:run_rank",
            "several_optimizers": False,
            "needs_inner": False,
        }
    return found


def _servers(arguments: Mapping[str, Any]) -> ServerProcesses:
    return ServerProcesses(int(arguments["servers"]), 2 if arguments["backup"] == "on" else 1)


SERVER = SyncInfo(
    "paceline_server.sync.server:ServerSums",
    exact=True,
    every_step=True,
    sends="gradients",
    arguments={
        "staleness": Argument(
            whole_or_inf, 0.0, "by how many global batches a worker may be ahead: a whole number or inf"
        ),
        "period": Argument(whole(1), 1, "the number of steps between agreements, at least 1"),
        "servers": Argument(whole(1), 1, "the number of servers that share the parameters, at least 1"),
        "lr": OUTER_LR,
        "momentum": OUTER_MOMENTUM,
        "backup": Argument(one_of(("on", "off")), "on", "on or off: a second process for each server"),
    },
    check=_check,
    compresses=True,
    codes_alone=True,
    several_optimizers=True,
    needs_inner=False,
    varies=_variants,
    servers=_servers,
)
