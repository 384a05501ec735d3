"""Sizes as people write them: "8MiB" to bytes and back."""

import re

# Binary prefixes only: "GB" means 10**9 bytes on data sheets and 2**30 in most tools, so it is not guessed.
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_SIZE = re.compile(rf"\s*([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(UNITS)})?\s*")


def parse_size(size: str | int, *, name: str = "size") -> int:
    """Return a size in bytes.

    Args:
        size: bytes as a whole number, or text: a number with an optional unit of `UNITS`, "8MiB" or "1.5 GiB".
        name: what an error calls the argument.

    Raises:
        ValueError: not such a size, or not a whole number of bytes, or less than one byte.
    """
    match = _SIZE.fullmatch(str(size)) if isinstance(size, str | int) and not isinstance(size, bool) else None
    number = float(match[1]) * UNITS[match[2] or "B"] if match else 0.0
    if number < 1 or not number.is_integer():
        raise ValueError(
            f"{name}={size!r} is not a size: give a whole number of bytes, at least 1, or a number with "
            f'{", ".join(UNITS)}, like "8MiB"{_near(str(size))}'
        )
    return int(number)


def _near(size: str) -> str:
    """A size in binary units for one in units of 1000, or in other letters."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt])i?b?\s*", size, flags=re.IGNORECASE)
    return f'; did you mean "{match[1]}{match[2].upper()}iB"?' if match else ""


def format_size(size: int | float) -> str:
    """Return bytes as text in the largest unit that leaves at least 1: 75497472 is "72 MiB", 1610612736 "1.5 GiB"."""
    unit = max((unit for unit in UNITS if UNITS[unit] <= abs(size)), key=UNITS.__getitem__, default="B")
    return f"{size / UNITS[unit]:.4g} {unit}"
