"""A secure sum is the sum, whoever is lost on the way, and nothing but the sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SecureSumError
from paceline_federated.secure.client import SecureClient
from paceline_federated.secure.fixed_point import FixedPoint
from paceline_federated.secure.masks import Numbers, add_mask, agreed_key, neighbours
from paceline_federated.secure.messages import PublicKeys, Terms, Unmasking, default_threshold
from paceline_federated.secure.server import SecureSum
from paceline_federated.secure.shares import Recovery, divided


class Round:
    """A round of clients in this process; `lost` says after which phase a client is heard of no more."""

    def __init__(self, vectors: Mapping[int, Numbers], threshold: int, lost: Mapping[int, str] | None = None) -> None:
        numbers = len(next(iter(vectors.values())))
        self.terms = Terms("round 1", threshold, numbers, len(vectors))
        self.server = SecureSum(self.terms)
        self.clients = {number: SecureClient(number) for number in vectors}
        self.vectors, self.lost = vectors, lost or {}
        self.sent: dict[int, Numbers] = {}
        self.shares: dict[int, dict[int, bytes]] = {}

    def sum(self) -> Numbers:
        for number, client in self.clients.items():
            self.server.take_keys(number, client.keys())
        keys = self.server.close_keys()
        for number in self.there("keys"):
            self.server.take_shares(number, self.clients[number].shares(self.terms, keys))
        self.shares = shares = self.server.close_shares()
        for number in self.there("keys", "shares"):
            self.sent[number] = self.clients[number].masked(shares[number], self.vectors[number].copy())
            self.server.take_vector(number, self.sent[number])
        survivors = self.server.close_vectors()
        for number in self.there("keys", "shares", "vectors"):
            self.server.take_unmasking(number, self.unmasking(number, survivors))
        return self.server.close_unmasking()

    def unmasking(self, number: int, survivors: set[int]) -> Unmasking:
        return self.clients[number].unmask(survivors)

    def there(self, *phases: str) -> list[int]:
        return [number for number in self.clients if self.lost.get(number) not in phases]


def some_vectors(clients: int, numbers: int = 50) -> dict[int, Numbers]:
    random = np.random.default_rng(clients)
    return {at + 1: random.integers(0, 2**32, numbers, dtype=np.uint32) for at in range(clients)}


def summed(vectors: Mapping[int, Numbers]) -> Numbers:
    total: Numbers = np.stack(list(vectors.values())).sum(axis=0, dtype=np.uint32)
    return total


def test_the_masks_of_all_clients_cancel() -> None:
    vectors = some_vectors(5)
    assert np.array_equal(Round(vectors, 4).sum(), summed(vectors))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whoever_is_lost_the_sum_is_that_of_the_others(data: st.DataObject) -> None:
    clients = data.draw(st.integers(4, 8))
    threshold = default_threshold(clients)
    gone = data.draw(st.lists(st.integers(1, clients), max_size=clients - threshold, unique=True))
    lost = {number: data.draw(st.sampled_from(["keys", "shares", "vectors"])) for number in gone}
    vectors = some_vectors(clients)
    total = Round(vectors, threshold, lost).sum()
    in_the_sum = {n: v for n, v in vectors.items() if lost.get(n) not in ("keys", "shares")}
    assert np.array_equal(total, summed(in_the_sum))


@pytest.mark.parametrize("phase", ["keys", "shares", "vectors"])
def test_a_round_with_too_few_left_gives_no_sum_and_says_how_many_there_were(phase: str) -> None:
    lost = {1: phase, 2: phase}
    with pytest.raises(SecureSumError, match=r"3 clients stayed .* 4 are needed"):
        Round(some_vectors(5), 4, lost).sum()


def test_what_a_client_sends_has_nothing_of_its_vector() -> None:
    vectors = {number: np.zeros(20_000, dtype=np.uint32) for number in (1, 2, 3)}
    one = Round(vectors, 3)
    one.sum()
    for sent in one.sent.values():
        counts = np.bincount(sent >> 24, minlength=256)
        assert (counts > 0).all()
        # chi-squared with 255 degrees of freedom: beyond 400 once in 10^8
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 400


def test_a_vector_that_comes_late_stays_hidden_though_the_pairwise_masks_are_known() -> None:
    vectors = some_vectors(4)
    one = Round(vectors, 3, {4: "shares"})
    assert np.array_equal(one.sum(), summed({n: vectors[n] for n in (1, 2, 3)}))
    late = one.clients[4].masked(one.shares[4], vectors[4].copy())
    # the server has got the lost client's mask key back, and takes off all that it made of it
    pair, name = one.clients[4]._for_masks, one.terms.name.encode()
    for number in (1, 2, 3):
        add_mask(late, agreed_key(pair, one.clients[number]._for_masks.public, "mask", name), 1)
    assert (late != vectors[4]).all()
    add_mask(late, one.clients[4]._own_mask, -1)
    assert np.array_equal(late, vectors[4])


@pytest.mark.parametrize("lost", [{}, {3: "shares", 17: "shares", 40: "keys", 41: "vectors"}])
def test_many_clients_mask_with_their_neighbours_alone(lost: dict[int, str]) -> None:
    vectors = some_vectors(50, 20)
    total = Round(vectors, default_threshold(50), lost).sum()
    assert np.array_equal(total, summed({n: v for n, v in vectors.items() if lost.get(n) not in ("keys", "shares")}))


@given(st.integers(2, 90), st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_neighbours_are_mutual_and_reach_every_client(clients: int, most: int) -> None:
    keys = {number: number.to_bytes(32, "big") for number in range(1, clients + 1)}
    around = {number: neighbours(number, keys, b"round", most) for number in keys}
    assert all(number in around[other] for number, others in around.items() for other in others)
    assert all(number not in others for number, others in around.items())
    reached, fresh = {1}, {1}
    while fresh := set().union(*(around[number] for number in fresh)) - reached:
        reached |= fresh
    assert reached == set(keys)


class Lying(Round):
    """A round in which client 1 changes what it gives up."""

    def unmasking(self, number: int, survivors: set[int]) -> Unmasking:
        told = super().unmasking(number, survivors)
        if number != 1:
            return told
        return Unmasking({n: bytes(len(share)) for n, share in told.of_own_masks.items()}, told.of_mask_keys)


def test_one_client_with_wrong_shares_does_not_change_the_sum() -> None:
    vectors = some_vectors(5)
    assert np.array_equal(Lying(vectors, 4).sum(), summed(vectors))


def test_wrong_shares_without_a_spare_client_are_an_error_and_no_wrong_sum() -> None:
    with pytest.raises(SecureSumError, match="wrong ones"):
        Lying(some_vectors(4), 4).sum()


def test_a_client_gives_up_nothing_for_a_sum_of_too_few() -> None:
    one = Round(some_vectors(5), 4)
    one.sum()
    with pytest.raises(SecureSumError, match="unmask after unmask"):
        one.clients[1].unmask({1, 2, 3, 4})
    ends = {number: SecureClient(number) for number in (1, 2, 3)}
    ends[1].shares(Terms("r", 2, 5, 5), {n: e.keys().keys for n, e in ends.items()})
    with pytest.raises(SecureSumError, match="clients sent shares"):
        ends[1].masked({}, np.zeros(5, dtype=np.uint32))


@pytest.mark.parametrize(("clients", "threshold"), [(2, 2), (4, 2), (5, 6)])
def test_terms_that_would_not_hide_a_client_are_refused_by_the_client(clients: int, threshold: int) -> None:
    terms = Terms("r", threshold, 5, 9)
    ends = {number: SecureClient(number) for number in range(1, clients + 1)}
    keys = {number: end.keys().keys for number, end in ends.items()}
    with pytest.raises(SecureSumError, match=r"at least 3|more than half"):
        ends[1].shares(terms, keys)


def test_a_server_that_changes_keys_or_shares_is_found() -> None:
    terms = Terms("r", 3, 5, 9)
    ends = {number: SecureClient(number) for number in (1, 2, 3)}
    keys = {number: end.keys().keys for number, end in ends.items()}
    with pytest.raises(SecureSumError, match="other keys"):
        ends[1].shares(terms, {**keys, 1: PublicKeys(bytes(32), bytes(32))})
    with pytest.raises(SecureSumError, match="same key"):
        ends[2].shares(terms, {**keys, 4: keys[3]})
    ends = {number: SecureClient(number) for number in (1, 2, 3)}
    keys = {number: end.keys().keys for number, end in ends.items()}
    sealed = {number: end.shares(terms, keys) for number, end in ends.items()}
    with pytest.raises(SecureSumError, match="share of client 2 does not open"):
        ends[1].masked({2: sealed[3][1], 3: sealed[3][1]}, np.zeros(5, dtype=np.uint32))


def test_a_vector_counts_once_and_only_in_its_phase() -> None:
    one = Round(some_vectors(4), 3)
    one.sum()
    with pytest.raises(SecureSumError, match="too late"):
        one.server.take_vector(1, one.vectors[1])
    fresh = SecureSum(Terms("r", 3, 5, 9))
    keys = SecureClient(1).keys()
    fresh.take_keys(1, keys)
    with pytest.raises(SecureSumError, match="twice"):
        fresh.take_keys(1, keys)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_any_threshold_of_shares_gives_a_secret_back(secret: bytes, threshold: int, spare: int) -> None:
    holders = list(range(3, 3 + threshold + spare))
    shares = divided(secret, holders, threshold)
    chosen = sorted(holders, key=lambda h: hash((secret, h)))[:threshold]
    assert Recovery(chosen).secret(shares) == secret


def test_shares_below_the_threshold_are_as_likely_for_any_other_secret() -> None:
    """Two of three shares leave every value of the third open: each gives another secret."""
    shares = divided(bytes(32), [1, 2, 3], 3)
    found = set()
    for guess in range(50):
        third = np.frombuffer(shares[3], dtype="<u4").copy()
        third[0] = (int(third[0]) + guess) % (2**31 - 1)
        found.add(Recovery([1, 2, 3]).secret({**shares, 3: third.tobytes()}))
    assert len(found) > 20


@given(
    st.lists(st.lists(st.floats(-2, 2), min_size=3, max_size=3), min_size=1, max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_a_sum_in_fixed_point_is_the_sum_to_half_a_step_per_client(rows: list[list[float]]) -> None:
    numbers = FixedPoint(2.0, 20)
    total = np.zeros(3, dtype=np.uint32)
    for row in rows:
        total += numbers.encode(torch.tensor(row, dtype=torch.float64))
    exact = torch.tensor(rows, dtype=torch.float64).sum(dim=0)
    assert (numbers.decode(total) - exact).abs().max() <= len(rows) * numbers.step * 0.5001


@pytest.mark.parametrize("bad", [2.5, -2.5, float("nan"), float("inf")])
def test_a_number_beyond_the_bound_is_refused_before_it_is_masked(bad: float) -> None:
    with pytest.raises(SecureSumError, match=r"number 1 of 2 .* beyond the bound of 2"):
        FixedPoint(2.0, 3).encode(torch.tensor([0.0, bad]))


def test_a_mask_is_taken_off_by_its_key_alone() -> None:
    numbers = some_vectors(1, 70_000)[1]
    masked = numbers.copy()
    add_mask(masked, b"k" * 32)
    assert (masked != numbers).mean() > 0.999
    add_mask(masked, b"l" * 32, -1)
    assert not np.array_equal(masked, numbers)
    add_mask(masked, b"l" * 32)
    add_mask(masked, b"k" * 32, -1)
    assert np.array_equal(masked, numbers)
