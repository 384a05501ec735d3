"""Policies as they are written on the command line: `full`, `full:every=2`, `selective:attention`, `auto:0.5`."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.policies import Policy, resolve_policy

PLAIN = "none"
POLICIES_HELP = (
    "policies by comma: none, full, selective, auto, with their options after colons: full:every=2, "
    "full:segment_size=sqrt, full:select=first-4, selective:attention, auto:0.5"
)


def parse_policies(text: str) -> dict[str, Policy | None]:
    """Return the policies of a list, by how each is written; None stands for plain training.

    Raises:
        UsageError: the list is empty, or has a policy that does not exist.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--policies {text!r}: names no policy: give {POLICIES_HELP}")
    return {name: parse_policy(name) for name in names}


def parse_policy(text: str) -> Policy | None:
    """Return the policy that is written as its shorthand and options: a value alone is that of the first option.

    Raises:
        UsageError: no such policy or option, or a value that the policy does not accept.
    """
    word, *options = text.split(":")
    if word == PLAIN and not options:
        return None
    try:
        policy: Any = resolve_policy(word)
        given = dict(_option(option, [field.name for field in fields(policy)]) for option in options)
        return replace(policy, **given)  # type: ignore[no-any-return]
    except (ValueError, TypeError) as error:
        raise UsageError(f"policy {text!r}: {error}") from error


def _option(text: str, names: list[str]) -> tuple[str, Any]:
    name, _, value = text.partition("=") if "=" in text else (names[0], "", text)
    if name not in names or not value:
        raise ValueError(f"has no option {text!r}; it has {', '.join(names)}")
    return name, _value(value)


def _value(text: str) -> Any:
    readings: tuple[Callable[[str], Any], ...] = (int, float)
    for reading in readings:
        try:
            return reading(text)
        except ValueError:
            continue
    return text
