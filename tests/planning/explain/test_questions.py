"""Questions of `--what-if`: what each means, and what is said of those that cannot be answered."""

from __future__ import annotations

import pytest

from handmade_search import job
from paceline.cluster.cluster import named_cluster
from paceline.errors import ClusterError, PlanError
from paceline.planning.explain.explain import Explanation, explain
from paceline.planning.explain.questions import Answer, answers, read_question
from paceline.planning.explain.what_if import Case
from paceline.planning.search.search import search

CLUSTER = named_cluster("2x4xA100-SXM-80, 200gbit, 2/h")


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(job(), CLUSTER, search(job(), CLUSTER), what_would_help=False)


def ask(explanation: Explanation, question: str) -> Answer:
    return answers(explanation, Case(job(), CLUSTER), [question])[0]


@pytest.mark.parametrize(
    ("question", "ranks"),
    [("one more host", 12), ("1 host fewer", 4), ("twice the hosts", 16), ("half the devices", 4)],
)
def test_other_numbers_of_hosts_are_searched_anew(explanation: Explanation, question: str, ranks: int) -> None:
    found = ask(explanation, question).candidate
    assert found is not None
    assert found.layout.machines.devices == ranks


def test_the_same_amount_of_training_is_priced_whatever_the_batch_is(explanation: Explanation) -> None:
    doubled = ask(explanation, "twice the batch")
    assert doubled.cost is not None
    assert doubled.now_cost is not None
    assert doubled.cost == pytest.approx(doubled.now_cost, rel=0.3)  # not twice as much
    assert doubled.cost_of == "as many samples"


def test_keys_change_the_known_plans_and_degrees_name_a_whole_one(explanation: Explanation) -> None:
    recomputed = ask(explanation, "remat=block").candidate
    assert recomputed is not None
    assert recomputed.plan.remat == "block"
    whole = ask(explanation, "dp=2 tp=4 sequence=on microbatches=2").candidate
    assert whole is not None
    assert str(whole.plan) == "dp=2 tp=4 sequence=on microbatches=2"


def test_a_plan_that_cannot_run_is_said_with_the_reason(explanation: Explanation) -> None:
    assert "tp=3" in ask(explanation, "tp=3").why
    assert ask(explanation, "tp=3").gain is None


def test_another_cluster_and_another_precision_can_be_asked_for(explanation: Explanation) -> None:
    faster, slower = ask(explanation, "8xH100-SXM, 3/h"), ask(explanation, "fp32")
    assert faster.gain is not None
    assert slower.gain is not None
    assert faster.gain > 0 > slower.gain
    assert "fp8" in ask(explanation, "fp8").why  # an A100 has none


def test_fp8_makes_products_faster_where_the_device_has_it() -> None:
    on = named_cluster("8xH100-SXM")
    found = explain(job(), on, search(job(), on), what_would_help=False)
    answer = answers(found, Case(job(), on), ["fp8"])[0]
    assert answer.gain is not None
    assert answer.gain > 0


def test_less_memory_costs_throughput_and_more_links_do_not(explanation: Explanation) -> None:
    assert (ask(explanation, "0.25 times the memory").gain or 0) <= 0
    assert (ask(explanation, "twice the links").gain or 0) >= 0


def test_a_question_that_nobody_understands_names_the_nearest_one() -> None:
    with pytest.raises(PlanError, match='Did you mean "twice the memory"'):
        read_question("twise the memory")
    with pytest.raises(PlanError, match="remat"):
        read_question("rematt=none")
    with pytest.raises(ClusterError, match="catalogue"):
        read_question("8xH1000")


def test_answers_are_told_in_json_with_their_plans(explanation: Explanation) -> None:
    values = ask(explanation, "one more host").to_json()
    assert values["plan"]
    assert values["question"] == "one more host"
