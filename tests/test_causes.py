"""The peak by cause: figures, a table, and advice where activations are not the problem."""

from typing import Any

from rich.console import Console

from lightning_ckpt.causes import MemoryByCause, unique_bytes

MIB = 2**20
CAUSES = MemoryByCause(
    params=10 * MIB,
    gradients=10 * MIB,
    optimizer=20 * MIB,
    activations=40 * MIB,
    boundaries=5 * MIB,
    temporaries=15 * MIB,
    other=0,
    plain=100 * MIB,
)


def test_the_parts_are_the_peak() -> None:
    """What a plain step would keep is no part of it."""
    assert CAUSES.peak == 100 * MIB


def test_figures_are_logged_in_gib() -> None:
    """One key a cause."""
    figures = CAUSES.figures()
    assert figures["memory/optimizer_gib"] == 20 / 1024
    assert len(figures) == 7


def test_it_prints_what_there_is(capsys: Any) -> None:
    """Sizes and shares; what is nothing has no row."""
    Console(width=100).print(CAUSES)
    text = capsys.readouterr().out
    assert "Peak: 100 MiB" in text
    assert "40.0%" in text
    assert "other" not in text


def test_where_activations_are_little_it_says_so(capsys: Any) -> None:
    """Where they would be less than a quarter even without checkpointing, the cure is another."""
    assert CAUSES.advice() is None
    small = MemoryByCause(
        params=50 * MIB,
        gradients=50 * MIB,
        optimizer=100 * MIB,
        activations=0,
        boundaries=2 * MIB,
        temporaries=2 * MIB,
        other=0,
        plain=10 * MIB,
    )
    advice = small.advice()
    assert advice is not None
    assert "blocks would keep 10 MiB without checkpointing" in advice
    assert "parameters, gradients and optimizer state are 200 MiB" in advice
    assert "accumulate_grad_batches" in advice


def test_memory_counts_once() -> None:
    """Two names of one memory are one memory."""
    assert unique_bytes([(1, 10), (2, 5), (1, 10)]) == 15
