"""What the pages under docs/ tell people to write is read by what it is written for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from paceline.cluster.cluster import Cluster
from paceline.plans.plan import Plan
from paceline.plans.sync_info import CODECS, RULES, CompressSpec

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_cluster_to_rehearse_on_is_one() -> None:
    [text] = [block for block in blocks("network.md", "yaml") if "emulate:" in block]
    emulate = Cluster.model_validate({"name": "here", "hosts": [], "emulate": yaml.safe_load(text)["emulate"] | {"cpu": 1}}).emulate
    assert emulate is not None
    assert emulate.hosts == len(yaml.safe_load(text)["emulate"]["cpu"]) == 4


def test_the_network_policy_lets_only_the_runs_own_pods_in() -> None:
    [text] = [block for block in blocks("network.md", "yaml") if "NetworkPolicy" in block]
    policy = yaml.safe_load(text)
    own = policy["spec"]["podSelector"]
    assert own["matchLabels"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}


@pytest.mark.parametrize("page", ["network.md", "sync.md"])
def test_every_plan_in_an_example_can_be_read(page: str) -> None:
    plans = [text for text in re.findall(r'--plan "([^"]+)"', (DOCS / page).read_text()) if "averaging" not in text]
    assert plans
    for text in plans:
        assert str(Plan.parse(text))


def test_every_rule_and_codec_has_its_place() -> None:
    text = (DOCS / "sync.md").read_text()
    assert [rule for rule in RULES if f"`{rule}" not in text] == []
    table = " ".join(
        line.split("|")[1] for line in text.partition("## Codecs")[2].partition("## A rule")[0].splitlines() if line.startswith("| `")
    )
    named = [word for word in re.findall(r"`([^`]+)`", table) if word != "compress="]
    assert {word.partition(":")[0].partition("+")[0] for word in named} == {*CODECS, "auto"}
    for word in named:
        if word not in ("auto", "topk:SHARE", "powersgd:RANK"):
            CompressSpec.parse(word)


def test_the_loop_of_ones_own_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    [script] = blocks("own_loop.md", "python")
    exec(script, {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) == 3
    exec(script, {"__name__": "__main__"})
    assert capsys.readouterr().out == ""  # all epochs were done


def test_the_page_names_every_script_of_examples_loops() -> None:
    text = (DOCS / "own_loop.md").read_text()
    there = {path.name for path in (DOCS.parent / "examples" / "loops").glob("*.py")}
    assert [name for name in there if f"`{name}`" not in text] == []
