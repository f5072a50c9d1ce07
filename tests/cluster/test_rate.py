"""A rate that is read wrong makes every figure of an emulated cluster wrong, by a factor of 8 or 1000."""

import pytest

from paceline.cluster.host import bits_per_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5 Gbit/s", 25 * 10**8), ("56kbit", 56_000), ("25MBIT", 25 * 10**6)],
)
def test_a_rate_is_bits_a_second_in_powers_of_ten(text: str, expected: int) -> None:
    assert bits_per_s(text) == expected


@pytest.mark.parametrize(
    "text", ["100", "100mb", "100mbps", "100 MB/s", "-1mbit", "0gbit", "1tbit", "", "1e3mbit", "401gbit", "2kbit"]
)
def test_what_is_no_rate_or_might_mean_bytes_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate such as 25mbit or 1gbit"):
        bits_per_s(text)
