"""Sizes as people write them."""

import pytest

from lightning_ckpt.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8MiB", 8 * 2**20), ("1.5 GiB", 3 * 2**29), ("12", 12), ("12B", 12), (4096, 4096), (" 1KiB ", 1024)],
)
def test_a_size_is_bytes_or_a_number_with_a_binary_unit(text: str | int, size: int) -> None:
    """Plain numbers are bytes; units are powers of 1,024."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8MB", "8 gib", "", "MiB", "-1MiB", "0", "0.5", 0, True, 1.5, None])
def test_anything_else_is_refused_with_what_is_accepted(text: object) -> None:
    """The error names the argument, the value and the units."""
    with pytest.raises(
        ValueError,
        match=r"activation=.* is not a size: give a whole number of bytes, at least 1, or a number with B, KiB, MiB",
    ):
        parse_size(text, name="activation")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [(72 * 2**20, "72 MiB"), (3 * 2**29, "1.5 GiB"), (1023, "1023 B"), (0, "0 B"), (-8 * 2**20, "-8 MiB")],
)
def test_a_size_is_shown_in_its_largest_unit(size: int, text: str) -> None:
    """Four digits, and the unit that leaves at least one before the point."""
    assert format_size(size) == text
