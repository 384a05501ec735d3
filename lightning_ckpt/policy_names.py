"""Policies in one word, with their options after colons: `full`, `full:every=2`, `selective:attention`, `auto:0.5`."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from lightning_ckpt.policies import Full, MemoryBudget, Policy, SelectiveOps

_WORDS: dict[str, Policy] = {"full": Full(), "selective": SelectiveOps(), "auto": MemoryBudget()}


def resolve_policy(policy: str | Policy) -> Policy:
    """The policy object that is meant: a value alone after the colon is that of the policy's first option.

    Raises:
        ValueError: something that is no policy, an option that it does not have, or a value that it does not accept.
    """
    if isinstance(policy, Full | SelectiveOps | MemoryBudget):
        return policy
    word, *options = policy.split(":") if isinstance(policy, str) else (None,)
    if word not in _WORDS:
        raise ValueError(
            f'policy={policy!r}: accepted are "full", "selective", "auto", with options as in "full:every=2", and the '
            "policy objects Full(...), SelectiveOps(...) and MemoryBudget(...)"
            f"{'; for plain training leave checkpointing out' if policy in (None, 'none') else ''}"
        )
    meant: Any = _WORDS[word]
    names = [field.name for field in fields(meant)]
    try:
        return replace(meant, **dict(_option(option, names) for option in options))  # type: ignore[no-any-return]
    except (ValueError, TypeError) as error:
        raise ValueError(f"policy={policy!r}: {error}") from error


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
