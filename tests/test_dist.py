"""What is given away works without the checkout.

The wheel has all that it needs, and so has the site of the documentation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from browser import opened, tab

ROOT = Path(__file__).parent.parent
SOURCES = (
    "src",
    "examples",
    "docs",
    "pyproject.toml",
    "build_backend.py",
    "mkdocs.yml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)
PAGES = (
    "index.html",
    "tutorials/first_run.html",
    "reference/plan.html",
    "reference/api.html",
    "reference/cli.html",
    "architecture.html",
    "results/index.html",
)


def run(*command: object, folder: Path) -> str:
    """What a program printed that ended well; it sees no checkout of paceline."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of the checkout that what is given away is made of, where building may leave something."""
    place = tmp_path / "copy"
    place.mkdir()
    for name in SOURCES:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "*.egg-info", "runs")
        shutil.copytree(source, place / name, ignore=ignored) if source.is_dir() else shutil.copy(source, place / name)
    (place / "tests").mkdir()
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "tests/messages.txt"):
        shutil.copy(ROOT / name, place / name)
    return place


@pytest.mark.timeout(600)
def test_an_installation_leaves_nothing_in_the_checkout(copy: Path, tmp_path: Path) -> None:
    before = sorted(copy.rglob("*"))
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--target", tmp_path / "installed", copy, folder=tmp_path)
    assert (tmp_path / "installed" / "paceline" / "py.typed").exists()
    assert (tmp_path / "installed" / "paceline" / "report" / "templates" / "style.css").exists()
    assert sorted(file for file in copy.rglob("*") if "__pycache__" not in file.parts) == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_trains_the_demo_in_an_empty_environment_and_folder(copy: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", copy, folder=tmp_path)
    [wheel], [_] = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    env, folder = tmp_path / "env", tmp_path / "empty"
    folder.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", env, folder=tmp_path)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        env / "bin" / "python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        folder=tmp_path,
    )
    [packages] = env.glob("lib/python*/site-packages")
    # The dependencies are those of the environment of the tests; a line of a .pth file adds no editable installation
    # from there.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copy(ROOT / "examples" / "digits.yaml", folder)

    assert str(packages) in run(
        env / "bin" / "python", "-c", "import paceline; print(paceline.__file__)", folder=folder
    )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(env / "bin" / "paceline", "--version", folder=folder) == f"paceline {version}\n"
    said = run(env / "bin" / "paceline", "train", "digits.yaml", "--plan", "dp=2", "--run", "run", folder=folder)
    assert "metric_above: accuracy" in said
    run(env / "bin" / "paceline", "report", "run", folder=folder)
    assert "<html" in (folder / "run" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.needs_chromium
def test_the_site_is_built_without_a_dead_link_and_its_pages_ask_for_nothing_from_elsewhere(
    copy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The hook of the site imports paceline: that of the copy.
    command = "import sys; sys.path.insert(0, 'src'); from mkdocs.__main__ import cli; cli()"
    run(sys.executable, "-c", command, "build", "--strict", "--quiet", folder=copy)
    site = copy / "build" / "site"
    reference = (site / "reference" / "api.html").read_text()
    assert all(f'id="paceline.{name}"' in reference for name in ("train", "setup", "Job", "Plan"))
    # A socket of the browser bears no long path.
    with opened(tmp_path_factory.mktemp("chromium")) as chromium, tab(chromium) as browser:
        for name in PAGES:
            browser.open(site / name)
            assert browser.all("h1"), name
            assert browser.requests() == [], name
            # The search alone needs a server: browsers start no workers in pages that are opened from files.
            assert [line for line in browser.console() if "search_index.js" not in line] == [], name
