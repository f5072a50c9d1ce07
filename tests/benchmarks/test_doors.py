"""The benchmark of the frameworks' scripts times equal work only."""

from __future__ import annotations

import pytest

import doors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("framework", ["ddp", "accelerate"])
def test_a_script_with_our_line_takes_the_steps_of_the_script_as_it_is(framework: str) -> None:
    with doors.script(framework, "plain", ()) as theirs, doors.script(framework, "shm", ()) as ours:
        doors.prove_same_work(theirs, ours, exact=True)
        assert min(theirs.ask(["steps", 2]) + ours.ask(["steps", 2])) > 0


def test_a_codec_is_held_to_later_losses_and_other_work_is_not_timed() -> None:
    with doors.script("ddp", "plain", ()) as theirs, doors.script("ddp", "int8", ()) as ours:
        doors.prove_same_work(theirs, ours, exact=False)
        ours.ask(["losses", 30])  # is ahead now
        with pytest.raises(SystemExit, match="does not do the work of"):
            doors.prove_same_work(theirs, ours, exact=True)


def test_the_figure_is_the_median_ratio_of_neighbouring_blocks() -> None:
    blocks = [(2.0, 1.0)] * 5 + [(20.0, 10.0)]  # other work on the machine holds both sides up
    assert doors.ratio(blocks).middle == 2.0
