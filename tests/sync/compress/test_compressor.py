"""Compressed sums over real ranks.

The same bits everywhere, near the exact sum, nothing lost in the long run, and resumed bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.errors import PlanError
from paceline.sync.compress import Compressor
from paceline.sync.rule import Traffic
from ranks import RankError, Ranks
from refusals import raises

CODECS = ("fp16", "bf16", "int8", "int4", "1bit", "topk:0.05", "topk:0.05+bf16", "powersgd:2", "powersgd:2+int8")
SHAPES = ((48, 40), (40,), (48, 40), (16, 8, 3, 3), (7,), (200, 60), (3, 3), (60, 200))
TAIL = (0.25, -3.0, 1e-7)  # losses and votes


def tensors(
    shapes: Sequence[tuple[int, ...]] = SHAPES, tail: int = len(TAIL), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor and the views of its beginning; `tail` numbers follow these."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(sizes) + tail, dtype=dtype)
    return flat, [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """Numbers of very different sizes, in matrices of full rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank)) * torch.logspace(
        -2, 0, numel
    )


def exact_sum(size: int, step: int, numel: int) -> Tensor:
    return torch.stack([gradient(r, step, numel) for r in range(size)]).double().sum(dim=0)


def off_by(found: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(found[: len(exact)].double() - exact) / torch.linalg.vector_norm(exact))


def summed(steps: int) -> dict[str, Any]:
    """By codec: the results of some sums, and what was counted."""
    with joined(deadline_s=30) as group:
        flat, views = tensors()
        coded, found = flat.numel() - len(TAIL), {}
        for codec in CODECS:
            traffic, before = Traffic(), group.sent_bytes
            compressor, results = Compressor(codec, group, traffic), []
            for step in range(steps):
                flat[:coded] = gradient(group.rank, step, coded)
                flat[coded:] = torch.tensor(TAIL)
                compressor.sum("a", flat, views)
                results.append(flat.clone())
            found[codec] = {
                "results": results,
                "traffic": traffic,
                "sent": group.sent_bytes - before,
                "said": compressor.messages,
            }
        return found


def test_every_rank_gets_the_same_bits_and_what_is_no_gradient_stays_exact(ranks: Ranks) -> None:
    first, *others = ranks(3, summed, 3)
    for codec in CODECS:
        for other in others:
            for mine, theirs in zip(first[codec]["results"], other[codec]["results"], strict=True):
                assert torch.equal(mine, theirs), codec
        for result in first[codec]["results"]:
            torch.testing.assert_close(result[-len(TAIL) :], 3 * torch.tensor(TAIL), rtol=1e-6, atol=0)
        assert first[codec]["said"] == []


def test_a_sum_is_as_near_as_the_codec_allows_and_its_bytes_are_counted(ranks: Ranks) -> None:
    limits = {"fp16": (1e-3, 0.5), "bf16": (6e-3, 0.5), "int8": (0.02, 0.28), "int4": (0.4, 0.16)}
    found = ranks(2, summed, 1)[0]
    for codec, of_codec in found.items():
        result, traffic = of_codec["results"][0], of_codec["traffic"]
        worst, share = limits.get(codec, (1.0, 0.45))
        assert 0 < off_by(result, exact_sum(2, 0, len(result) - len(TAIL))) < worst, codec
        assert 0 < traffic.relative_error < worst, codec
        assert traffic.plain_bytes == result.nbytes, "2 (n - 1) / n = 1"
        assert 0 < traffic.sent_bytes < (share + 0.01) * traffic.plain_bytes, codec
        assert 0 <= of_codec["sent"] - traffic.sent_bytes < 2000, "as the group counts, but for a question at the start"


def flushed(steps: int) -> dict[str, list[float]]:
    """Error of the sum of all results by codec, after one gradient and after more steps.

    The later steps send nothing more.
    """
    with joined(deadline_s=30) as group:
        flat, views = tensors(tail=0)
        exact = exact_sum(group.size, 0, flat.numel())
        found: dict[str, list[float]] = {}
        for codec in CODECS:
            compressor, total = Compressor(codec, group, Traffic()), torch.zeros(flat.numel(), dtype=torch.float64)
            found[codec] = []
            for step in range(1 + steps):
                flat.copy_(gradient(group.rank, 0, flat.numel())) if step == 0 else flat.zero_()
                compressor.sum("a", flat, views)
                total += flat
                if step in (0, steps):
                    found[codec].append(off_by(total, exact))
        return found


def test_what_a_sum_leaves_out_comes_with_the_next_ones(ranks: Ranks) -> None:
    """Both what the ranks' own codes lost and what the code of the sum lost."""
    for codec, (at_first, at_last) in ranks(2, flushed, 60, backend="shm")[0].items():
        # The sum of the factors Q has no feedback of its own.
        assert at_last < (0.01 if codec == "powersgd:2+int8" else max(at_first / 10, 1e-6)), codec


def resumed() -> dict[str, Any]:
    """The fourth sum of a run by codec, of a resumed one, and the kept state.

    The resumed one started from the state after the second.
    """
    with joined(deadline_s=30) as group:
        flat, views = tensors()

        def step(compressor: Compressor, number: int) -> Tensor:
            flat.copy_(gradient(group.rank, number, flat.numel()))
            compressor.sum("layer/0", flat, views)
            return flat.clone()

        found = {}
        for codec in CODECS:
            through = Compressor(codec, group, Traffic(), seed=5)
            for number in (0, 1):
                step(through, number)
            state = through.state_dict()
            step(through, 2)
            again = Compressor(codec, group, Traffic(), seed=6)
            again.load_state_dict(state)
            assert again.state_dict().keys() == state.keys(), (
                "a checkpoint written before the first sum keeps what was loaded"
            )
            step(again, 2)
            found[codec] = step(through, 3), step(again, 3), sorted(state)
        return found


def test_a_resumed_compressor_goes_on_bit_for_bit(ranks: Ranks) -> None:
    for found in ranks(2, resumed):
        for codec, (expected, result, kept) in found.items():
            assert torch.equal(expected, result), codec
            assert kept == [
                "layer/0/error",
                f"layer/0/{'q' if codec.startswith('powersgd') else 'sum_error'}",
                "random",
            ]


def with_a_bad_number() -> dict[str, Any]:
    """Results by codec where one rank has a NaN or an infinity, and in the next step.

    And whether the kept state stayed as it was.
    """
    with joined(deadline_s=30) as group:
        flat, views = tensors()
        coded = flat.numel() - len(TAIL)
        found: dict[str, Any] = {}
        for codec, bad in itertools.product(CODECS, (float("nan"), float("-inf"))):
            compressor, results = Compressor(codec, group, Traffic()), []
            states = []
            for step in range(3):
                flat[:coded] = gradient(group.rank, step, coded)
                flat[coded:] = torch.tensor(TAIL)
                if (step, group.rank) == (1, 1):
                    flat[1234] = bad
                compressor.sum("a", flat, views)
                results.append(flat.clone())
                states.append(compressor.state_dict())
            kept = all(torch.equal(states[0][key], states[1][key]) for key in states[0] if key != "random")
            found[f"{codec}, {bad}"] = results[1][:coded], results[1][coded:], kept, results[2]
        return found


def test_a_bad_number_comes_out_on_every_rank_and_leaves_no_trace(ranks: Ranks) -> None:
    for found in ranks(3, with_a_bad_number):
        for codec, (coded, tail, kept, next_one) in found.items():
            assert coded.isnan().all(), codec
            torch.testing.assert_close(tail, 3 * torch.tensor(TAIL), rtol=1e-6, atol=0)
            assert kept, codec
            assert next_one.isfinite().all(), codec


def overflowing() -> list[bool]:
    """Whether a result is finite, and what is kept, where every rank's numbers are but their sum is not."""
    with joined(deadline_s=30) as group:
        flat, views = tensors(((1024,),), 0)
        compressor = Compressor("int8", group, Traffic())
        flat.fill_(3e38)
        compressor.sum("a", flat, views)
        state = compressor.state_dict()
        return [
            bool(flat.isfinite().any()),
            all(bool(t.isfinite().all()) for key, t in state.items() if key != "random"),
        ]


def test_a_sum_too_large_for_fp32_comes_out_as_not_finite_and_leaves_no_trace(ranks: Ranks) -> None:
    assert ranks(2, overflowing) == [[False, True]] * 2


def of_ones(cases: Sequence[tuple[str, tuple[int, ...], int, torch.dtype]]) -> list[dict[str, Any]]:
    """One sum of ones for every (codec, shape, numbers that follow, dtype)."""
    with joined(deadline_s=30) as group:
        found = []
        for codec, shape, tail, dtype in cases:
            flat, views = tensors((shape,), tail, dtype)
            traffic = Traffic()
            compressor = Compressor(codec, group, traffic)
            flat.fill_(1.0)
            compressor.sum("a", flat, views)
            found.append({"flat": flat.clone(), "said": compressor.messages, "traffic": traffic})
        return found


def test_a_tensor_too_small_to_gain_is_summed_as_it_is(ranks: Ranks) -> None:
    """Also with fewer numbers than ranks, or none."""
    shapes = [((1,), 0), ((2, 1), 1), ((0, 4), 2), ((5, 5), 0)]
    cases = [(codec, shape, tail, torch.float32) for codec in CODECS for shape, tail in shapes]
    for results in ranks(3, of_ones, cases):
        for (codec, *_), result in zip(cases, results, strict=True):
            assert torch.equal(result["flat"], torch.full_like(result["flat"], 3.0))
            if codec not in ("fp16", "bf16"):
                assert len(result["said"]) == 1
                assert "summed as it is" in result["said"][0]
                assert result["traffic"].sent_bytes == result["traffic"].plain_bytes


def test_a_cast_of_gradients_that_have_16_bits_already_has_nothing_to_do(ranks: Ranks) -> None:
    cases = [(codec, (100, 20), 0, torch.bfloat16) for codec in ("bf16", "fp16")]
    for results in ranks(2, of_ones, cases):
        for (codec, *_), result in zip(cases, results, strict=True):
            assert result["said"] == [
                f"compress={codec}: a is summed as it is, for its 4000 bytes of bfloat16 would become 4000"
            ]
            assert result["traffic"].sent_bytes == result["traffic"].plain_bytes == 4000


def test_gradients_of_16_bits_are_compressed_too(ranks: Ranks) -> None:
    cases = [(codec, (128, 128), 1, torch.bfloat16) for codec in ("int8", "1bit", "powersgd:2")]
    for results in ranks(2, of_ones, cases):
        for result in results:
            torch.testing.assert_close(result["flat"].float(), torch.full((128 * 128 + 1,), 2.0), rtol=0.02, atol=0)
            assert result["traffic"].sent_bytes < 0.6 * result["traffic"].plain_bytes


def test_float64_is_refused_with_what_would_work(ranks: Ranks) -> None:
    with raises(RankError, "compress.dtype", dtype="float64", name="a", text="int8"):
        ranks(2, of_ones, [("int8", (100, 20), 0, torch.float64)])


def test_one_rank_alone_loses_nothing() -> None:
    flat, views = tensors()
    flat.copy_(gradient(0, 0, flat.numel()))
    before, traffic = flat.clone(), Traffic()
    Compressor("1bit", Group(), traffic).sum("a", flat, views)
    assert torch.equal(flat, before)
    assert traffic == Traffic()


def test_an_unknown_codec_is_refused() -> None:
    with raises(PlanError, "plan.compress_refused", text="int9"):
        Compressor("int9", Group(), Traffic())


def under_one_name() -> None:
    with joined(deadline_s=30) as group:
        compressor = Compressor("int8", group, Traffic())
        for rows in (100, 101):
            flat, views = tensors(((rows, 20),), 0)
            compressor.sum("a", flat, views)


def test_a_name_that_stands_for_two_tensors_is_refused(ranks: Ranks) -> None:
    with raises(RankError, "compress.name_reused", name="a", before=2000, now=2020):
        ranks(2, under_one_name)


def with_the_state_of_another_tensor() -> None:
    with joined(deadline_s=30) as group:
        flat, views = tensors(((100, 20),), 0)
        compressor = Compressor("int8", group, Traffic())
        compressor.load_state_dict({"a/error": torch.zeros(3, 128), "a/sum_error": torch.zeros(128)})
        compressor.sum("a", flat, views)


def test_the_state_of_another_tensor_is_refused(ranks: Ranks) -> None:
    with raises(RankError, "compress.kept_in_checkpoint", text="int8"):
        ranks(2, with_the_state_of_another_tensor)
