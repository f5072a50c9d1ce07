"""Every installed package has a hash, and the lock file fits pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes of every package in constraints.txt."""
    text = "\n".join(line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    found: dict[str, tuple[str, int]] = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        pin = re.match(r"([\w.-]+)==(\S+)", entry)
        assert pin is not None, entry
        found[canonicalize_name(pin[1])] = pin[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry))
    return found


def test_every_package_has_its_hashes() -> None:
    without = [name for name, (_, hashes) in locked().items() if not hashes]
    assert len(locked()) > 50
    assert not without


def test_all_that_pyproject_asks_for_is_there_in_a_version_that_fits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(r for extra in project["project"]["optional-dependencies"].values() for r in extra),
    ]
    pins = locked()
    wrong = []
    for requirement in map(Requirement, [*wanted, *project["build-system"]["requires"]]):
        name = canonicalize_name(requirement.name)
        if name in ("torch", "paceline"):  # torch has a wheel for each kind of machine: the Makefile names its version
            continue
        if name not in pins or not requirement.specifier.contains(pins[name][0], prereleases=True):
            wrong.append(str(requirement))
    assert not wrong, "run `make lock`"
    [torch] = re.findall(r"^TORCH := (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    [asked] = [Requirement(r) for r in wanted if Requirement(r).name == "torch"]
    assert asked.specifier.contains(torch.partition("==")[2])


@pytest.fixture(scope="module")
def of_the_module() -> None:
    """As those that many tests of one file share."""


@pytest.mark.usefixtures("of_the_module")
def test_this_xdist_knows_the_groups_of_this_pytest(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):  # which xdist sets in its workers
        pytest.skip("runs in one process")
    assert "@" in request.node.nodeid, "no group: every worker would make the fixtures of a module anew"
