"""The sizes that may be tried, against a list of them all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ckpt.allowed_sizes import AllowedSizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"multiple_of": 8, "divides": 100},
            "no multiple of multiple_of=8 that divides 100 lies between min_val=1 and",
        ),
        ({"min_val": 65, "max_val": 127, "divides": 128}, "that divides 128 lies between min_val=65 and max_val=127"),
        ({"min_val": 2, "divides": 1}, "that divides 1 lies between min_val=2 and max_val=None"),
        ({"divides": 0}, "divides=0: give a whole number of at least 1"),
    ],
    ids=str,
)
def test_a_number_that_no_allowed_size_divides_is_an_error(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllowedSizes(**arguments)


@given(
    min_val=st.integers(1, 40),
    max_val=st.none() | st.integers(1, 200),
    multiple_of=st.integers(1, 9),
    divides=st.none() | st.integers(1, 300),
    size=st.floats(0, 400),
)
def test_allowed_sizes_are_those_that_counting_finds(
    min_val: int, max_val: int | None, multiple_of: int, divides: int | None, size: float
) -> None:
    """Smallest, largest, nearest, next above and next below, against a list of every allowed size."""
    end = 1000  # beyond what is asked
    allowed = [
        n
        for n in range(min_val, (max_val or end) + 1)
        if n % multiple_of == 0 and (divides is None or divides % n == 0)
    ]
    arguments = {"min_val": min_val, "max_val": max_val, "multiple_of": multiple_of, "divides": divides}
    if not allowed:
        with pytest.raises(ValueError, match=f"no multiple of multiple_of={multiple_of} "):
            AllowedSizes(**arguments)
        return
    sizes, whole = AllowedSizes(**arguments), int(size)
    assert sizes.smallest == allowed[0]
    assert sizes.largest == (math.inf if max_val is None and divides is None else allowed[-1])
    assert sizes.nearest(size) == max((n for n in allowed if n <= size), default=allowed[0])
    assert sizes.next_above(whole) == min((n for n in allowed if n > whole), default=None)
    assert sizes.next_below(whole) == max((n for n in allowed if n < whole), default=None)
