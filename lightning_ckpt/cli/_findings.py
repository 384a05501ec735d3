"""What a check finds: a status, the evidence in numbers, and what to type."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        status: `"fail"` where training is wrong or checkpointing can't do what it is for, `"warn"` where it gains less
            than it could, `"skip"` where the question does not arise or can't be answered.
        evidence: what was seen, with numbers.
        cure: what to type; empty where nothing is to be done.
    """

    status: Status
    evidence: str
    cure: str = ""


class NotApplicable(Exception):
    """A check can't be made; its text says why."""


class OutOfMemory(NotApplicable):
    """Training steps did not fit into memory; the text says how that was seen."""


def passed(evidence: str) -> Finding:
    """All is well."""
    return Finding("pass", evidence)


def warned(evidence: str, cure: str) -> Finding:
    """Checkpointing gains less, or costs more, than it could."""
    return Finding("warn", evidence, cure)


def failed(evidence: str, cure: str) -> Finding:
    """Training is wrong, or checkpointing can't do what it is for."""
    return Finding("fail", evidence, cure)


def some(names: list[str]) -> str:
    """Return a few names of a list, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[: 2 if more else 3])) + more
