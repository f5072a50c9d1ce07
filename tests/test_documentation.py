"""Samples in the pages work, and what pages name or link to exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
import paceline_lab
import paceline_server
from commands import parsed
from paceline.cli import commands
from paceline.cluster.catalogue import CATALOGUE
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Emulate, Host, Link
from paceline.job.known import models
from paceline.planning.plan import Plan
from paceline.planning.sync_info import CODECS, RULES, CompressSpec

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "paceline"
# they name files by their place in the package, too
MAPS = [ROOT / "ARCHITECTURE.md", ROOT / "tests" / "faults" / "README.md"]
PAGES = [*MAPS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


# of the root: see docs/site_pages.py
GENERATED = tuple(f"{up}{page}.md" for up in ("", "../") for page in ("architecture", "contributing", "changelog"))


def commands_in(page: Path) -> list[str]:
    """The lines of a page's shell blocks that call `paceline`, but for those that leave something out."""
    shell = "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)).replace("\\\n", " ")
    return [line for line in shell.splitlines() if line.startswith("paceline ")]


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them of plain words."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in found}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def module_of(name: str) -> Any:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cluster_to_emulate_is_one() -> None:
    [text] = [block for block in blocks("how-to/emulate_a_cluster.md", "yaml") if "emulate:" in block]
    emulate = Cluster.model_validate(
        {"name": "here", "hosts": [], "emulate": yaml.safe_load(text)["emulate"] | {"cpu": 1}}
    ).emulate
    assert emulate is not None
    assert emulate.hosts == len(yaml.safe_load(text)["emulate"]["cpu"]) == 4


def test_the_network_policy_lets_only_the_runs_own_pods_in() -> None:
    [text] = [block for block in blocks("how-to/secure_the_network.md", "yaml") if "NetworkPolicy" in block]
    policy = yaml.safe_load(text)
    own = policy["spec"]["podSelector"]
    assert own["matchLabels"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_plan_in_an_example_can_be_read(page: Path) -> None:
    text = page.read_text()
    planning = re.findall(r'--plan "([^"…]+)"', text) + [
        p for several in re.findall(r'--plans "([^"]+)"', text) for p in several.split(";")
    ]
    for plan in planning:
        # of examples/extend, which is not installed here
        if not any(name in plan for name in ("majority", "exponent", "loopback")):
            assert str(Plan.parse(plan))


def test_plans_are_looked_for_where_they_are() -> None:
    assert sum(len(re.findall(r'--plan "', page.read_text())) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_that_paceline_takes(page: Path) -> None:
    for line in commands_in(page):
        words = shlex.split(line, comments=True)[1:]
        if not words[0].startswith("--"):
            parsed(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading_of_it(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        if path in GENERATED:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not heading or linked.suffix != ".md" or heading in headings(linked.read_text()) or "." in heading, (
            target
        )


def test_the_generated_tables_have_every_device_and_every_known_model() -> None:
    site_pages = module_of("site_pages")
    shown = [line.split(" | ")[0].removeprefix("| ") for line in site_pages.devices().splitlines()[2:]]
    assert shown == list(CATALOGUE)
    listed = site_pages.known_models()
    assert [model.name for model in models() if f"`{model.name}`" not in listed] == []
    texts = "".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    assert [marker for marker in site_pages.GENERATED if texts.count(marker) != 1] == []


def test_the_reference_has_every_public_name() -> None:
    text = module_of("site_pages").every_public_name()
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(
        f"{package.__name__}.{name}"
        for package in (paceline, paceline_lab, paceline_server)
        for name in package.__all__
    )


def test_the_reference_has_every_command_and_every_option() -> None:
    parts = re.split(r"^## `paceline (.*)`$", module_of("site_pages").every_command(), flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    known = every_command_of(commands())
    assert sections.keys() == known.keys()
    for name, command in known.items():
        options = {
            option for p in command.params if not getattr(p, "hidden", False) for option in p.opts if option[0] == "-"
        }
        shown = set(re.findall(r"^\| (`-[^|]*)\|", sections[name], re.MULTILINE))
        assert options <= set(re.findall(r"`([^`]+)`", " ".join(shown))), name


def every_command_of(found: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return commands and the commands below them by their full names."""
    return {
        full: command
        for name, one in found.items()
        for full, command in {
            f"{above}{name}": one,
            **every_command_of(vars(one).get("commands", {}), f"{above}{name} "),
        }.items()
    }


def test_the_reference_has_every_key_of_a_cluster_with_its_default() -> None:
    text = (DOCS / "reference" / "cluster.md").read_text()
    listed: list[tuple[str, str]] = [
        (key, default.strip("`"))
        for keys, default in re.findall(r"^\| (`[a-z_0-9`, ]+) \| ([^|]+) \|", text, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", keys)
    ]
    expected = []
    for part in (Cluster, Emulate, Host, Link):
        for key, field in part.model_fields.items():
            default = field.get_default(call_default_factory=True)
            words = {None: "none", (): "none" if part is Cluster else "[]"}
            expected.append((key, "required" if field.is_required() else words.get(default, str(default))))
    assert sorted(listed) == sorted(expected)
    assert [key for key in Device.model_fields if f"`{key}`" not in text] == []


def test_the_results_and_the_figures_of_the_readme_are_those_of_the_data() -> None:
    results = module_of("results")
    behind = [path.name for path, text in results.generated().items() if path.read_text() != text]
    assert behind == [], "run `make results`"


def test_every_result_has_a_method_a_date_and_a_legend_for_every_mark() -> None:
    results = module_of("results")
    for name, record in results.load_records().items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]), name
        assert len(record["method"].split()) >= 5, name
        assert record["machine"] in results.load("machines"), name
        for table in record.get("tables", ()):
            cells = " ".join(str(cell) for row in table["rows"] for cell in row)
            assert set(re.findall(r"[†*‡](?![\w*])", cells)) == set(table.get("marks", {})), name
            assert ("bold_below" in table) == ("bold_means" in table), name


def test_every_rule_and_codec_has_its_place() -> None:
    text = (DOCS / "reference" / "sync.md").read_text()
    assert [rule for rule in RULES.built_in if f"`{rule}" not in text] == []
    table = " ".join(
        line.split("|")[1]
        for line in text.partition("## Codecs")[2].partition("## A rule")[0].splitlines()
        if line.startswith("| `")
    )
    named = [word for word in re.findall(r"`([^`]+)`", table) if word != "compress="]
    assert {word.partition(":")[0].partition("+")[0] for word in named} == {*CODECS.built_in, "auto"}
    for word in named:
        if word not in ("auto", "topk:SHARE", "powersgd:RANK"):
            CompressSpec.parse(word)


def test_the_loop_of_ones_own_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [script] = blocks("how-to/own_loop.md", "python")
    exec(script, {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) == 3
    exec(script, {"__name__": "__main__"})
    assert capsys.readouterr().out == ""  # all epochs were done


def test_the_page_names_every_script_of_examples_loops() -> None:
    text = (DOCS / "how-to" / "own_loop.md").read_text()
    there = {path.name for path in (DOCS.parent / "examples" / "loops").glob("*.py")}
    assert [name for name in there if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.name)
def test_every_file_and_definition_that_a_map_names_is_there(page: Path) -> None:
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|yaml|toml|csv)|/))(?::([\w.]+))?`", page.read_text())
    files = [(path, name) for path, name in named if not path.startswith(("runs/", "job.yaml", "cluster.yaml"))]
    assert [path for path, _ in files if not _places(path)] == []
    assert [f"{path}:{name}" for path, name in files if name and not _defines(_places(path)[0], name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"(?<![\w/.-])((?:src/paceline|examples|tests|benchmarks|docs)/[\w./-]*\w)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_event_has_its_place() -> None:
    recorders = ("events", "event", "report", "tell", "_tell", "on_event")
    recorded = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 1:
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                texts = (
                    [each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
                    if node.args
                    else []
                )
                recorded |= {text for text in texts if name in recorders and re.fullmatch("[a-z_]+", str(text))}
    rows = re.findall(
        r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", (DOCS / "reference" / "events.md").read_text(), re.MULTILINE
    )
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    # recorded under a name that a variable holds, by a generator or by the recorder itself
    assert named - recorded == {"lines_lost", "nonfinite", "spike", "slow_rank", "slow_rank_over"}
    assert recorded - named == set()


def test_every_environment_variable_has_its_place() -> None:
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".c", ".cpp", ".j2")]
    strings = [text for path in sources for text in re.findall(r"PACELINE_[A-Z_]*[A-Z]", path.read_text())]
    constants = {"PACELINE_COMPILED"}  # of the cost model, no variable
    page = (DOCS / "reference" / "environment_variables.md").read_text()
    named = set(re.findall(r"`(PACELINE_[A-Z_]+)`", page))
    assert named == set(strings) - constants


def test_the_map_has_every_folder_of_the_package_and_is_short() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [*PACKAGE.iterdir(), *PACKAGE.parent.glob("paceline_*")]
    folders = [path.name for path in packages if path.is_dir() and (path / "__init__.py").exists()]
    assert [folder for folder in folders if f"\n| `{folder}/` | " not in text] == []
    assert [file.name for file in PACKAGE.glob("[!_]*.py") if f"`{file.name}`" not in text] == []
    assert len(text.splitlines()) <= 200


def test_the_order_of_the_map_is_the_order_of_the_layers() -> None:
    layers = re.findall(r"^    \"(paceline\..*)\",$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    place = {name.strip().removeprefix("paceline."): i for i, layer in enumerate(layers) for name in layer.split("|")}
    shown = [
        place[folder]
        for folder in re.findall(r"^\| `(\w+)/` \| ", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
        if not folder.startswith("paceline_")
    ]
    assert shown == sorted(shown)


def _places(path: str) -> list[Path]:
    """Where a path of a map lies: in the repository, or in the package."""
    return [place for place in (ROOT / path, PACKAGE / path, PACKAGE.parent / path) if place.exists()]


def _defines(file: Path, name: str) -> bool:
    """Whether a module has a definition of this name, or a class of it a member: `Class.member`."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for word in name.split("."):
        found = [node for node in body if word in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
