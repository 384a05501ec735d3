"""What is said on stderr while a command works: what it is doing, and each warning once."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

# How the warning of blocks that no policy changes begins; their names follow, and the reason.
LEFT_ALONE = "Left alone: "


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show what is going on: as long as it does on a terminal, and as a line where stderr is redirected."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        print(f"lightning-ckpt: {what}", file=sys.stderr, flush=True)
        yield


@contextmanager
def warnings_once() -> Iterator[list[str]]:
    """Keep warnings back, however often they come, and print each once at the end.

    Policies that choose fewer blocks leave fewer alone: for each reason, the warning that names the most is printed.

    Yields:
        Their texts, which are there when the context is closed.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += _widest([str(warning.message) for warning in caught])
            for text in texts:
                print(f"lightning-ckpt: {text}", file=sys.stderr)


def _widest(texts: list[str]) -> list[str]:
    """Each text once; of those that leave blocks alone for one reason, the longest."""
    by_reason: dict[str, str] = {}
    for text in texts:
        reason = text.split(": ", 2)[-1] if text.startswith(LEFT_ALONE) else text
        by_reason[reason] = max(by_reason.get(reason, ""), text, key=len)
    return list(by_reason.values())
