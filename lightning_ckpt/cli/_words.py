"""A comparison in words and cells: what the terminal, the page and W&B say alike."""

from lightning_ckpt.cli._measurement import Comparison, Measurement
from lightning_ckpt.sizes import format_size

COLUMNS = ("policy", "step, ms", "spread", "of plain", "samples/s", "peak", "of plain", "activations", "equal")


def row(one: Measurement, plain: Measurement | None) -> list[str]:
    """Return a measurement as cells under `COLUMNS`."""
    low, high = one.spread
    rate = one.samples_per_second
    return [
        one.policy,
        f"{1000 * one.step_time:.1f}",
        f"{(high - low) / one.step_time:.0%}",
        f"{one.step_time / plain.step_time:.2f}" if plain else "",
        "" if rate is None else f"{rate:.1f}",
        format_size(one.memory.peak),
        f"{one.memory.peak / plain.memory.peak:.2f}" if plain else "",
        format_size(one.memory.causes["activations"]),
        _equality(one, plain),
    ]


def described(one: Measurement) -> str:
    """Say what was measured on what."""
    batch = "" if one.samples is None else f"batch of {one.samples}, "
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    return f"{batch}{len(one.seconds)} steps a policy, {one.device}, {versions}"


def finding(comparison: Comparison) -> str:
    """Say in a sentence or two what came of it: the lowest peak and its price, and whether training is the same."""
    plain = comparison.plain
    if plain is None:
        return "Plain training could not be measured, so there is nothing to compare with."
    if len(comparison.measured) == 1:
        which = "No policy could be measured" if comparison.failed else "Nothing was measured"
        return f"{which} beside plain training, whose peak is {format_size(plain.memory.peak)}."
    least = min(comparison.measured, key=lambda one: one.memory.peak)
    if least is plain:
        which = f"No policy{' that could be measured' if comparison.failed else ''}"
        return (
            f"{which} needs less memory than plain training, {format_size(plain.memory.peak)}. {equality(comparison)}"
        )
    return (
        f'"{least.policy}" lowers the peak from {format_size(plain.memory.peak)} to {format_size(least.memory.peak)}, '
        f"{least.memory.peak / plain.memory.peak:.1%} of plain training's, for {least.step_time / plain.step_time:.2f} "
        f"times its step time. {equality(comparison)}"
    )


def equality(comparison: Comparison) -> str:
    """Say whether every policy that was measured computed what plain training does."""
    plain = comparison.plain
    assert plain is not None
    for one in comparison.measured:
        if different := one.differences(plain):
            more = f" and {len(different) - 1} more" if different[1:] else ""
            return f'With "{one.policy}" the first step differs from plain training\'s in its {different[0]}{more}.'
    policies = "every policy that could be measured" if comparison.failed else "every policy"
    return (
        f"Loss and gradients of the first step, {len(plain.digests)} tensors, are those of plain training, "
        f"bit for bit, with {policies}."
    )


def _equality(one: Measurement, plain: Measurement | None) -> str:
    if plain is None or one is plain:
        return ""
    different = one.differences(plain)
    return f"no, {len(different)}" if different else "yes"
