"""What all schedulers have in common."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.elastic.submit import scheduler
from paceline.elastic.submit.scheduler import Scheduler, State
from paceline.errors import LaunchError


class Busy(Scheduler):
    """Answers to every second question."""

    asked = 0

    def state(self, submission: Any) -> State:
        self.asked += 1
        if self.asked % 2:
            raise LaunchError(
                "test.planted", "`squeue` failed with exit code 1: slurm_load_jobs error: Unexpected message received"
            )
        return State("running")


def test_a_scheduler_that_fails_to_answer_once_does_not_end_the_following(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "_AGAIN_S", 0.0)
    submission: Any = None
    assert Busy().steady_state(submission) == State("running")
    assert "Unexpected message received. It is asked again for 5 minutes." in capsys.readouterr().out
    monkeypatch.setattr(scheduler, "_AWAY_S", -1.0)
    with pytest.raises(LaunchError, match="Unexpected message"):
        Busy().steady_state(submission)
