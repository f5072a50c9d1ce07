"""A benchmark's directory.

What is measured (`protocol.json`), each finished run (`measured.jsonl`), the runs themselves, the report.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.files import write_whole
from paceline.planning.plan import Plan
from paceline.run.record.run import JsonLines, differences, read_lines
from paceline.storage.url import is_url
from paceline_lab.scaling.settings import Setting
from paceline_lab.scaling.summary import FinishedRun

PROTOCOL, MEASURED, REPORT = "protocol.json", "measured.jsonl", "report.json"


@contextmanager
def kept_at(out: str | Path | None, say: Callable[[str], object]) -> Iterator[Path | None]:
    """Directory of a benchmark; that of a URL is uploaded while the block runs.

    Raises:
        RunError: a run is there, somebody else measures there, or, at the end, not all could be uploaded.
        StorageError: the store cannot be used.
    """
    if not is_url(out):
        yield None if out is None else Path(out)
        return
    from paceline.run.object_store.run import RemoteRun
    from paceline.run.object_store.upload import Kind

    with RemoteRun(out, say, resume=True, kind=Kind("benchmark", PROTOCOL, MEASURED)) as remote:
        say(f"benchmark {remote.url} · its working directory is {remote.path}")
        yield remote.path
        remote.check()


class BenchmarkDirectory:
    """The directory of a benchmark, from which an interrupted one continues.

    Raises:
        RunError: there is something in `path`, and it is not a benchmark.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / PROTOCOL
        try:
            self.protocol: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
            occupied = self.protocol is None and path.exists() and (not path.is_dir() or any(path.iterdir()))
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read: {error}. Name another directory with --out.") from error
        if occupied:
            raise RunError(
                f"{path} is not a benchmark's directory: it has no {PROTOCOL}. Name a new or an empty one with --out."
            )

    def begun_with(self) -> tuple[Plan, list[str]] | None:
        """Plan for N devices and plans tried, if a benchmark was begun here.

        Raises:
            RunError: it was written by something else.
        """
        if self.protocol is None:
            return None
        try:
            return Plan.parse(self.protocol["plan"]), [str(line) for line in self.protocol["knobs"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{self.path / PROTOCOL} is not of a benchmark ({error!r}). Name another directory with --out."
            ) from error

    def begin(self, protocol: dict[str, Any]) -> None:
        """Begin with `protocol`, or continue what was begun under the same one.

        Raises:
            RunError: what was begun here measures something else, all of which is named; or nothing can be written.
        """
        protocol = json.loads(json.dumps(protocol))
        if self.protocol is None:
            try:
                (self.path / "runs").mkdir(parents=True, exist_ok=True)
                write_whole(self.path / PROTOCOL, json.dumps(protocol, indent=1))
            except OSError as error:
                raise RunError(
                    f"the benchmark cannot be kept in {self.path}: {error.strerror}. Name a directory with --out."
                ) from error
            self.protocol = protocol
        elif found := list(differences(self.protocol, protocol)):
            raise RunError(
                f"{self.path} belongs to another benchmark: {'; '.join(found)}. Name another directory with --out."
            )

    def finished(self, settings: Sequence[Setting]) -> dict[str, list[FinishedRun]]:
        """The runs that were measured, by setting, in the order of their rounds."""
        found: dict[str, list[FinishedRun]] = {setting.key: [] for setting in settings}
        try:
            for line in read_lines(self.path / MEASURED):
                run = FinishedRun.load(line)
                found[run.setting].append(run)
        except (KeyError, TypeError) as error:
            raise RunError(
                f"{self.path / MEASURED} has a line that is not a run of this benchmark: {error!r}"
            ) from error
        return {key: sorted(runs, key=lambda run: run.round) for key, runs in found.items()}

    def new_run(self, setting: Setting, round_: int) -> Path:
        """The directory of a new run, emptied of an unfinished one's files."""
        path = self.path / "runs" / f"{setting.key}-r{round_ + 1}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def add(self, run: FinishedRun) -> None:
        """Keep a finished run."""
        lines = JsonLines(self.path / MEASURED)
        lines.write(json.dumps(run.to_json()))
        lines.close()
