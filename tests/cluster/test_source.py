"""A wrong cluster file says where and what to do; the user has nothing else to go by."""

from pathlib import Path

import pytest

from paceline.cluster.cluster import Cluster
from paceline.errors import ClusterError

GOOD = """\
name: lab
hosts:
- name: a
  cores: 2
  memory_bytes: 8000000000
  gpus:
  - {index: 0, name: T4, memory_bytes: 16000000000}
- name: b
  cores: 2
  memory_bytes: 8000000000
"""


@pytest.mark.parametrize(
    ("change", "to", "message"),
    [
        (
            "  cores: 2\n  memory_bytes: 8000000000\n  gpus",
            "  core: 2\n  memory_bytes: 8000000000\n  gpus",
            'line 4: unknown key "core" in hosts[0]. Did you mean "cores"?',
        ),
        ("name: lab", "colour: red", 'line 1: unknown key "colour" in the cluster. Known: name, hosts'),
        ("name: T4", "name: T4, indx: 1", 'line 7: unknown key "indx" in hosts[0].gpus[0]. Did you mean "index"?'),
        (
            "- name: b\n  cores: 2",
            '- name: b\n  cores: "2"',
            "line 9: hosts[1].cores should be a whole number, got '2'",
        ),
        ("- name: b", "- cpu: b", 'line 8: hosts[1] needs the key "name"'),
        ("name: b", "name: a", "two hosts are named 'a'"),
        ("index: 0", "index: -1", "line 7: hosts[0].gpus[0].index should be at least 0, got -1"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line_and_the_fix(
    tmp_path: Path, change: str, to: str, message: str
) -> None:
    assert change in GOOD
    file = tmp_path / "cluster.yaml"
    file.write_text(GOOD.replace(change, to))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(GOOD.replace("name: lab", "nam: lab").replace("cores: 2", "cores: two"))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(file)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; a cluster needs at least hosts, emulate or catalogue"),
        ("- a", "line 1: a cluster is a group of keys with values, such as `emulate: .*`, not a list"),
        ("a: [", "this is not valid YAML"),
        ("\xff", "is not UTF-8 text: byte 0 is 0xff"),
        ("name: a\nname: b", 'line 2: the key "name" is there already, in line 1'),
    ],
)
def test_a_file_that_is_no_cluster_at_all_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ClusterError, match=message):
        Cluster.load(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere\.yaml: no such file"):
        Cluster.load(tmp_path / "nowhere.yaml")
