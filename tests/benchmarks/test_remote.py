"""The benchmark of remote calls measures echoes that are what was sent, and names its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

import remote
from remote import LARGE, SMALL


@pytest.mark.slow
def test_ours_and_torchs_take_turns_and_have_the_figures_of_the_page(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with remote.callers(["paceline", "torch_rpc"], {"folder": str(tmp_path)}, None, [None, None]) as ends:
        found = remote.blocks(ends, {SMALL: 3, LARGE: 1}, 2)
    assert [len(blocks_s) for blocks_s in found.values()] == [2] * 4
    figures = remote.report("here", found, "", "")
    assert figures["small_to_torch_rpc"] > 0
    assert figures["large_to_torch_rpc"] > 0
