"""Rules do what their papers say, and refuse arguments that they do not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from federated_jobs import federated_job, trainer_of
from paceline.errors import JobError
from paceline.job.job import Job
from paceline_federated.client import federated
from paceline_federated.rules import CONTROL, FedAdam, FedAvg, FederatedRule, FedProx, FedYogi, Local, Scaffold
from paceline_federated.section import FEDERATED_RULES, FederatedRuleSpec
from paceline_federated.simulation import Simulation
from refusals import raises
from small_jobs import small_job


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def stepped(rule: FederatedRule, *means: Tensor) -> Tensor:
    parameters = vector(0, 0)
    rule.start(parameters, 4)
    for mean in means:
        rule.step(parameters, mean, {CONTROL: vector(1, 1)}, 2)
    return parameters


def test_fedavg_moves_by_the_mean_and_keeps_momentum() -> None:
    assert stepped(FedAvg(), vector(1, 2)).tolist() == [1, 2]
    assert stepped(FedAvg(lr=0.5, momentum=0.5), vector(1, 2), vector(0, 0)).tolist() == [0.75, 1.5]


def test_fedadam_and_fedyogi_are_those_of_the_paper() -> None:
    for rule, second in ((FedAdam, 0.99 * 1e-6 + 0.01), (FedYogi, 1e-6 + 0.01)):
        found = stepped(rule(lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3), vector(1, 0))
        assert float(found[0]) == pytest.approx(0.1 * 0.1 / (second**0.5 + 1e-3))
        assert float(found[1]) == 0


def test_fedprox_pulls_towards_the_servers_parameters() -> None:
    gradients = vector(0, 0)
    FedProx(0.5).adjust(gradients, vector(3, 1), Local(vector(1, 1), {}, 0.1))
    assert gradients.tolist() == [1, 0]


def test_scaffold_takes_the_mean_gradient_as_control_variate() -> None:
    rule, local = Scaffold(), Local(vector(0, 0), {CONTROL: vector(1, 0)}, 0.1, {CONTROL: vector(0, 2)})
    gradients = vector(5, 5)
    rule.adjust(gradients, vector(0, 0), local)
    assert gradients.tolist() == [6, 3]
    # two steps of 0.1 along gradients of (3, 1) on average
    change = rule.finish(vector(-0.6, -0.2), torch.tensor(2.0, dtype=torch.float64), local)[CONTROL]
    assert change.tolist() == pytest.approx([2, 1])
    assert local.state[CONTROL].tolist() == pytest.approx([2, 3])
    assert stepped(rule, vector(1, 1)).tolist() == [1, 1]
    assert rule.sends()[CONTROL].tolist() == [0.5, 0.5]  # two of four clients


def test_the_mean_of_clients_control_variates_is_the_servers(tmp_path: Path) -> None:
    simulation = Simulation(federated_job({"rule": "scaffold", "local_epochs": 2}))
    trainer, server = trainer_of(simulation, tmp_path, batched=True), simulation.server
    for number in (1, 2, 3):
        aggregator = server.aggregator(number)
        for cohort in trainer.train(server.task(number), list(range(5))):
            aggregator.add_cohort(cohort)
        found = aggregator.aggregate()
        assert found is not None
        server.apply(found)
    kept = torch.stack([trainer.kept.state(client).rule[CONTROL] for client in range(5)])
    assert kept.norm() > 0
    torch.testing.assert_close(kept.mean(dim=0), server.rule.sends()[CONTROL])


def test_one_client_with_one_step_is_sgd(tmp_path: Path) -> None:
    job = federated_job({"clients": 1, "local_steps": 1}, global_batch=70)
    simulation = Simulation(job)
    task = simulation.server.task(1)
    [cohort] = trainer_of(simulation, tmp_path, batched=True).train(task, [0])
    model = simulation.training.show(task.weights)
    pairs = [simulation.data.train[index] for index in range(70)]
    inputs, labels = (torch.stack([pair[part] for pair in pairs]) for part in (0, 1))
    torch.nn.functional.cross_entropy(model(inputs.double()), labels).backward()
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(cohort.deltas[0], -0.1 * gradients)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedavgg", 'unknown federated rule "fedavgg". Did you mean "fedavg"'),
        ("fedprox,mu=0.1", "does not accept mu"),
        ("fedadam,beta=0.1", '"beta" is not a valid setting. Did you mean "beta'),
        ("fedbuff:0", 'must be the number of updates of a server step, at least 1, not "0"'),
        ("fedavg,lr", 'federate.rule fedavg,lr: "lr" is not a valid option'),
        ("scaffold,lr=-1", 'lr must be the server\'s learning rate, above 0 and at most 100, not "-1"'),
    ],
)
def test_an_unknown_rule_or_argument_is_refused_with_what_is_meant(text: str, told: str) -> None:
    with pytest.raises(JobError) as raised:
        FederatedRuleSpec.parse(text)
    assert told in str(raised.value)
    assert str(raised.value).startswith(f"federate.rule {text}")


@pytest.mark.parametrize("name", FEDERATED_RULES.built_in)
def test_every_rule_is_made_by_its_name_and_restores_its_state(name: str) -> None:
    spec = FederatedRuleSpec.parse(name)
    one, other = spec.build(), spec.build()
    parameters = [stepped(one, vector(1, 2)), vector(1, 2)]
    other.start(vector(0, 0), 4)
    other.load_state_dict({key: tensor.clone() for key, tensor in one.state_dict().items()})
    parameters[1].copy_(parameters[0])
    for rule, own in zip((one, other), parameters, strict=True):
        rule.step(own, vector(0.5, -1), {CONTROL: vector(1, 1)}, 2)
    assert parameters[0].tolist() == parameters[1].tolist()


@pytest.mark.parametrize(
    ("federate", "changes", "told"),
    [
        ({"rule": "scaffold"}, {"optimizer": {"name": "adam"}}, "needs optimizer: {name: sgd} without momentum"),
        ({"rule": "scaffold"}, {"clip_norm": 1.0}, "and no clip_norm"),
        ({}, {"precision": "bf16"}, "federated clients compute only in fp32 or fp64"),
        ({}, {"stop": {"epochs": 3}}, "a federated run counts rounds, not epochs"),
        ({}, {"nonfinite": "rewind"}, "always refuses updates with NaN or Inf"),
        ({"personal": ["haed.*"]}, {}, 'federate.personal: "haed.*" matches no trainable parameter'),
        ({"personal": ["*"]}, {}, "Share at least one parameter"),
    ],
)
def test_what_does_not_go_together_is_refused(federate: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as raised:
        Simulation(federated_job(federate, **changes))
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("federate", "told"),
    [
        ({"local_epochs": 1, "local_steps": 1}, "give either local_epochs or local_steps"),
        ({"clients": 3, "per_round": 4}, "per_round is 4, but there are 3 clients"),
        ({"clients": 3, "least": 4}, "least is 4, but a round has only 3 clients"),
        ({"aggregate": "trimmed:0.6"}, "mean, median or trimmed:SHARE"),
        ({"privacy": {"clip": 1, "noise": 1}, "aggregate": "median"}, "privacy needs aggregate: mean"),
        ({"privacy": {"clip": 1, "noise": 1}, "norm_bound": 1}, "privacy.clip already limits the norm of updates"),
        ({"partition": {"kind": "iid", "alpha": 0.3}}, "alpha belongs to kind: dirichlet"),
        ({"client": 3}, 'unknown key "client" in federate. Did you mean "clients"'),
    ],
)
def test_a_federated_part_that_contradicts_itself_is_refused(federate: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as raised:
        federated_job(federate)
    assert told in str(raised.value)


def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = federated_job({"simulate": {"drop_out": 0.5}}).to_yaml()
    file.write_text(text.replace("drop_out", "dropout"))
    [line] = [number for number, line in enumerate(file.read_text().splitlines(), 1) if "dropout" in line]
    with raises(JobError, "file.unknown_key", place=f"{file}, line {line}", key="dropout"):
        Job.load(file)


def test_a_federated_job_with_trackers_is_refused() -> None:
    job = small_job(trackers=["wandb"], federate={"clients": 2})
    with raises(JobError, "federate.trackers"):
        federated(job)
