"""`paceline submit`, `runs`, `cancel`: what is shown, submitted and remembered, and what is refused before.

kubectl is played by a script that keeps its arguments and answers as recorded, as no API server can be had in a test.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path

import pytest
import yaml

from commands import paceline, write_job
from paceline.cluster.discover import discover
from paceline.elastic.submit.scheduler import Submission, save
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run
from paceline.wire.key import RunKey

KUBECTL = """\
#!/bin/sh
echo "$@" >> {here}/calls
case "$1" in
api-versions) cat {here}/versions ;;
create) cat > {here}/created ;;
get) cat {here}/status ;;
logs)
    echo "step 1 of 6"
    echo '{{"status": {{"conditions": [{{"type": "{end}", "status": "True"}}]}}}}' > {here}/status
    ;;
esac
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job, where nothing was submitted from and no scheduler is found."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    write_job(tmp_path / "job.yaml")
    return tmp_path


def kubectl(here: Path, monkeypatch: pytest.MonkeyPatch, *, end: str = "Complete", versions: str = "batch/v1") -> None:
    """Put the stand-in there."""
    file = here / "bin" / "kubectl"
    file.write_text(KUBECTL.format(here=here, end=end))
    file.chmod(0o700)
    (here / "versions").write_text(versions.replace(" ", "\n"))
    (here / "status").write_text('{"status": {"active": 2}}')
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin")


@pytest.mark.parametrize("where", [["--on", "slurm"], ["--on", "sky", "--run", "s3://a/b"]], ids=["slurm", "sky"])
def test_hosts_train_the_overridden_job(where: list[str], here: Path) -> None:
    change = "stop={steps: 2}"
    shown = paceline("submit", "job.yaml", *where, "--dry-run", "--set", change, folder=here)
    assert shown.code == 0, shown.err
    [line] = [line for line in shown.out.splitlines() if " train " in line]
    assert f"--set={change}" in shlex.split(line.strip().removesuffix("&"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--on", "slrum"], 'Did you mean "slurm"'),
        (["--on", "slurm", "--num-hosts", "0"], "--num-hosts 0"),
        (["--on", "slurm", "--time", "1:30"], "90m, 1h30m or 2d"),
        (["--on", "sky", "--time", "1h"], "does not support a time limit"),
        (["--on", "slurm", "--scheduler-option", "partiton=a"], 'Did you mean "partition"'),
        (["--on", "slurm", "--plan", "dq=2"], "dq"),
        (["--on", "slurm", "--set", "optimizer.lrr=1"], "--set optimizer.lrr"),
        (["--on", "ray"], "RAY_ADDRESS"),
        (["--on", "ray", "--scheduler-option", "address=http://a:1", "--scheduler-option", "cpus=two"], "whole number"),
        (["--on", "sky"], "--run s3://bucket/run"),
        (["--on", "sky", "--run", "s3://a/b", "--scheduler-option", "spot=maybe"], "yes or no"),
        (["--on", "kubernetes", "--dry-run"], "--scheduler-option image"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_submitted_is_refused(arguments: list[str], told: str, here: Path) -> None:
    shown = paceline("submit", "job.yaml", *arguments, folder=here)
    assert shown.code == 1
    assert told in shown.error
    assert not list(here.glob("home/submitted/*"))


def test_a_job_file_that_is_missing_or_wrong_is_told_before_any_scheduler_is_asked(here: Path) -> None:
    assert "nowhere.yaml" in paceline("submit", "nowhere.yaml", "--on", "slurm", folder=here).error
    write_job(here / "bad.yaml", optimiser="sgd")
    assert 'Did you mean "optimizer"' in paceline("submit", "bad.yaml", "--on", "slurm", folder=here).error


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["--on", "slurm"], "sbatch"),
        (["--on", "ray", "--scheduler-option", "address=http://a:1"], "ray"),
        (["--on", "kubernetes", "--run", "s3://a/b", "--scheduler-option", "image=a"], "kubectl"),
        (["--on", "sky", "--run", "s3://a/b"], "sky"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scheduler_that_is_not_there_is_told_with_what_to_do_and_no_key_stays(
    arguments: list[str], program: str, here: Path
) -> None:
    error = paceline("submit", "job.yaml", *arguments, folder=here).error
    assert f"the command {program} is not on this machine. " in error
    assert not list(here.glob("home/submitted/*"))


def test_dry_shows_the_script_and_submits_nothing(here: Path) -> None:
    shown = paceline(
        "submit", "job.yaml", "--on", "slurm", "--num-hosts", "4", "--time", "1h", "--dry-run", folder=here
    )
    assert shown.code == 0
    assert shown.says(
        "#SBATCH --nodes=4", "#SBATCH --time=60", f"train {here}/job.yaml", "--resume", "scontrol requeue"
    )
    assert not list(here.glob("home/submitted/*"))


def test_dry_shows_a_sky_task_without_a_secret(here: Path) -> None:
    arguments = [
        "--num-hosts",
        "2",
        "--run",
        "s3://a/b",
        "--scheduler-option",
        "accelerators=H100:8",
        "--scheduler-option",
        "spot=yes",
        "--dry-run",
    ]
    task = yaml.safe_load(paceline("submit", "job.yaml", "--on", "sky", *arguments, folder=here).out)
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "H100:8", "use_spot": True})
    assert task["secrets"] == {"PACELINE_KEY": None}
    assert "train ~/paceline-job.yaml --plan auto --run s3://a/b --resume" in task["run"]


def test_dry_shows_the_command_for_ray(here: Path) -> None:
    arguments = [
        "--num-hosts",
        "2",
        "--scheduler-option",
        "address=http://a:1",
        "--scheduler-option",
        "gpus=8",
        "--dry-run",
    ]
    shown = paceline("submit", "job.yaml", "--on", "ray", *arguments, folder=here)
    assert shown.says(
        "ray job submit --address http://a:1", "--num-hosts 2 --gpus 8 -- train", "RAY_JOB_STOP_WAIT_TIME_S"
    )


def test_a_run_on_kubernetes_is_created_followed_and_remembered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(here, monkeypatch, versions="batch/v1 jobset.x-k8s.io/v1alpha2")
    options = ["--run", "s3://a/b", "--scheduler-option", "image=a", "--scheduler-option", "namespace=team"]
    shown = paceline("submit", "job.yaml", "--on", "kubernetes", "--num-hosts", "2", *options, folder=here)
    assert shown.code == 0, shown.err
    assert shown.says("submitted small-", "jobset/small-", "step 1 of 6", "is done, exit code 0, run s3://a/b")
    secret, job_set = yaml.safe_load_all((here / "created").read_text())
    assert RunKey.from_pem(secret["stringData"]["key.pem"].encode())
    assert job_set["kind"] == "JobSet"
    calls = (here / "calls").read_text()
    name = job_set["metadata"]["name"]
    assert f"get jobset/{name} --output=json --ignore-not-found --namespace=team" in calls
    pod = f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
    assert f"logs --follow --tail=-1 --selector={pod} --namespace=team" in calls
    assert "PRIVATE" not in calls + shown.out + shown.err
    listed = paceline("runs", folder=here)
    assert listed.says(name, "kubernetes", "done", "s3://a/b")
    assert "ended already: done" in paceline("cancel", name, folder=here).out


def test_the_exit_code_is_that_of_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(here, monkeypatch, end="Failed")
    options = ["--run", "s3://a/b", "--scheduler-option", "image=a"]
    shown = paceline("submit", "job.yaml", "--on", "kubernetes", *options, folder=here)
    assert shown.code == 1
    assert shown.says("is failed")
    assert paceline("runs", folder=here).says("failed, exit code 1")


def test_a_run_is_cancelled_by_the_label_of_all_its_objects(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(here, monkeypatch)
    options = ["--run", "s3://a/b", "--scheduler-option", "image=a", "--detach"]
    assert paceline("submit", "job.yaml", "--on", "kubernetes", *options, folder=here).code == 0
    [record] = here.glob("home/submitted/*.json")
    assert paceline("cancel", record.stem, folder=here).says("was told to end", "--run s3://a/b")
    label = f"--selector=app.kubernetes.io/instance={record.stem}"
    assert f"delete job,service,secret {label} --wait=false" in (here / "calls").read_text()


def test_a_cluster_without_the_kind_is_told_with_those_that_it_has(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(here, monkeypatch, versions="batch/v1 jobset.x-k8s.io/v1alpha2")
    options = ["--run", "s3://a/b", "--scheduler-option", "image=a", "--scheduler-option", "kind=trainjob"]
    error = paceline("submit", "job.yaml", "--on", "kubernetes", *options, folder=here).error
    assert "the cluster does not support a trainjob" in error
    assert "It has: jobset, job; say --scheduler-option kind=jobset." in error
    assert not (here / "created").exists()


def test_records_are_private_and_what_is_none_is_left_out(here: Path) -> None:
    save(Submission(name="mine-1", engine="slurm", id="7", hosts=2, job="j", run="/r", since=1.0, phase="done", code=0))
    folder = here / "home" / "submitted"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "mine-1.json").stat().st_mode) == 0o600
    (folder / "broken.json").write_text('{"name": ')
    (folder / "other.json").write_text(json.dumps({"name": "../../x", "engine": "slurm"}))
    os.symlink("/etc/passwd", folder / "link.json")
    listed = paceline("runs", folder=here)
    assert [line.split()[0] for line in listed.out.splitlines()] == ["name", "mine-1"]


def test_a_run_that_is_not_known_is_told_with_the_nearest(here: Path) -> None:
    assert "Nothing was submitted" in paceline("cancel", "mine", folder=here).error
    save(Submission(name="mine-1", engine="slurm", id="7", hosts=2, job="j", run="/r", since=1.0))
    assert 'Did you mean "mine-1"' in paceline("logs", "mine-2", folder=here).error


def test_a_scheduler_that_does_not_answer_hides_no_run(here: Path) -> None:
    save(Submission(name="mine-1", engine="slurm", id="7", hosts=2, job="j", run="/r", since=1.0))
    assert paceline("runs", folder=here).says("mine-1", "unknown: the command squeue is not on this machine")


def test_a_run_whose_directory_is_at_hand_is_listed_with_its_newest_step(here: Path) -> None:
    run = Run.create(here / "run", Job.load(here / "job.yaml"), discover(), Plan())
    steps = [{"step": n, "time": 1e9 + n, "loss": 1 / n} for n in range(1, 81)]
    (run.path / "steps" / "rank-0.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run.path / "events.jsonl").write_text(json.dumps({"event": "launch", "time": 1e9}) + "\n")
    (garbage := here / "garbage" / "steps").mkdir(parents=True)
    (garbage / "rank-0.jsonl").write_text("[1]\n")
    for name, where in (("at-hand", run.path), ("garbage", garbage.parent), ("gone", here / "gone")):
        one = Submission(name=name, engine="slurm", id="7", hosts=1, job="j", run=str(where), since=1.0, phase="done")
        save(one)
    lines = {line.split()[0]: line for line in paceline("runs", folder=here).out.splitlines()}
    assert lines["at-hand"].split()[2:4] == ["80", "0.0125"]
    assert all("0.0125" not in lines[name] for name in ("garbage", "gone"))
