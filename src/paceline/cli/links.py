"""`paceline links`"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import Hosts, in_a_folder, start_on
from paceline.cluster.launch_engines import is_rank

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.run.links import LinkResults, Wanted

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def command(
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Number of ranks.", show_default="one for each device")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes to measure, e.g. 1KiB,64KiB,16MiB.", show_default="1KiB to 16MiB")
    ] = None,
    transports: Annotated[
        str | None,
        typer.Option(
            help="Transports to measure: shm, gloo, tcp, or the backend of the accelerators.",
            show_default="all there are",
        ),
    ] = None,
    collectives: Annotated[
        str | None,
        typer.Option(
            help="Collectives: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_receive.",
            show_default="all",
        ),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Algorithms of the all-reduce: flat, ring, hierarchical, auto.",
            show_default="flat; between hosts the first three",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Cluster file (YAML) with hosts to emulate.", show_default="this machine"),
    ] = None,
    hosts: Hosts = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with the curves.", callback=in_a_folder)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON: figures and environment.")
    ] = False,
) -> None:
    """Measure collectives between ranks, compare them with the hardware's limits, and check their results.

    Under torchrun, start it on every host: torchrun … --no-python paceline links --transports gloo
    """
    start_on(hosts, cluster)
    from paceline.cli.command import to_run_on
    from paceline.cluster.discover import discover
    from paceline.console import Console
    from paceline.planning.sync_info import ALGORITHMS, TRANSPORTS
    from paceline.run import links

    where = to_run_on(cluster) or discover()
    possible = tuple(filter(None, (*TRANSPORTS.names, links.library_of(where))))
    named = _words("--transports", transports, possible)
    here = links.transports_of(where)
    if not is_rank() and len(where.hosts) == 1:  # under torchrun, `where` is only this host
        for name in named:
            # otherwise another transport would be measured under this name
            if name in TRANSPORTS.names and name not in here:
                raise typer.BadParameter(
                    f"{name} carries messages between hosts only; name them with --hosts or --cluster. Here it can be "
                    f"{', '.join(here)}",
                    param_hint="--transports",
                )
    wanted = links.Wanted(
        named or here,
        _words("--collectives", collectives, links.COLLECTIVES) or links.COLLECTIVES,
        _words("--algorithms", algorithms, (*ALGORITHMS, "auto")) or links.algorithms_of(where),
        _sizes(sizes) or links.SIZES,
    )
    if is_rank():
        found = _as_rank(wanted, transports)
        if found is None:  # only rank 0 prints
            return
    else:
        ranks = ranks or links.ranks_of(where)
        with Console(stderr=True).status("") as status:
            found = links.measure_links(
                where, ranks, wanted, say=lambda transport: status.update(f"measuring {transport}, {ranks} ranks")
            )
    _report(found, where, out, as_json=as_json)


def _as_rank(wanted: Wanted, named: str | None) -> LinkResults | None:
    """Measure one transport as a rank that torchrun started.

    Only rank 0 returns the results; the other ranks return None.
    """
    from paceline.comm.measure.links import LinksRequest, measure_on_rank
    from paceline.rank_environment import own_rank
    from paceline.run.links import LinkResults
    from paceline.run.process import fail

    if named is not None and len(wanted.transports) > 1:
        raise typer.BadParameter("under torchrun name one transport: its ranks join once", param_hint="--transports")
    try:
        transport = wanted.transports[0] if named else "auto"
        measured = measure_on_rank(LinksRequest(transport, wanted.collectives, wanted.algorithms, wanted.sizes))
    except Exception as error:  # noqa: BLE001 - every error is reported to torchrun
        fail(error)
    return LinkResults([measured]) if own_rank() == 0 else None


def _report(found: LinkResults, where: Cluster, out: Path | None, *, as_json: bool) -> None:
    """Write all results to the screen, a page and JSON; then raise any problems."""
    from paceline.cli.links_screen import show
    from paceline.cluster.discover import environment
    from paceline.comm.measure.links import figures
    from paceline.console import Console
    from paceline.errors import LaunchError, SyncError

    show(found, where, Console(highlight=False))
    about = environment()
    if out is not None and found.measured:
        from paceline.report.links_page import write_links_page

        command = shlex.join(["paceline", *sys.argv[1:]])
        typer.echo(f"page  {write_links_page(found.measured, where.describe(), command, about, out)}")
    if as_json:
        ranks = len(found.measured[0].limit.hosts) if found.measured else 0
        links = {"cluster": where.describe(), "ranks": ranks, "not_measured": found.failures}
        typer.echo(json.dumps({"figures": figures(found.measured), "environment": about | {"links": links}}))
    wrong = [
        f"{s.label} at {s.size_bytes} bytes: {s.wrong} numbers are wrong"
        for m in found.measured
        for s in m.speeds
        if s.wrong
    ]
    if wrong:
        raise SyncError(
            "links.wrong_numbers",
            "{wrong}\nDo not train over this transport. Please report this problem with the output of paceline doctor.",
            wrong="\n".join(wrong),
        )
    if found.failures:
        raise LaunchError(
            "links.not_measured",
            "{reasons}",
            reasons="\n".join(
                f"{transport} could not be measured: {error}" for transport, error in found.failures.items()
            ),
        )


def _words(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the checked words of a list option; empty if the option was not given."""
    words = tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))
    for word in words:
        if word not in known:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}", param_hint=option)
    return words


def _sizes(text: str | None) -> tuple[int, ...]:
    found = []
    for word in (text or "").split(","):
        if not word.strip():
            continue
        match = re.fullmatch(r"([0-9]+) *(|kib|mib|gib)", word.strip().lower())
        if match is None or int(match[1]) == 0:
            raise typer.BadParameter(f"{word.strip()!r} is not a size such as 64KiB or 16MiB", param_hint="--sizes")
        found.append(int(match[1]) * _UNITS[match[2]])
    return tuple(sorted(set(found)))
