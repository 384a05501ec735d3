"""Checks of what is checkpointed: whether anything is, what is left out, and what is not worth its replay."""

import statistics

from lightning_ckpt.cli._command import in_options
from lightning_ckpt.cli._findings import Finding, NotApplicable, failed, passed, some, warned
from lightning_ckpt.cli._patient import Patient
from lightning_ckpt.owners import owner_of
from lightning_ckpt.profiles import BlockProfile
from lightning_ckpt.sizes import format_size

_NAME_THEM = "name them: --blocks ABlockClass, --blocks 'encoder.layers.*', in Python blocks="
# How each owner's checkpointing is turned off, by how its reason begins.
_SWITCHES = {
    "gradient_checkpointing": "model.gradient_checkpointing_disable()",
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
    "a CheckpointWrapper": "no CheckpointWrapper around them",
}
# A block that saves this many times less for each second of replay than the others do is better kept.
_POOR = 5
# And a block that takes no more of the replay than this is not worth a word.
_NOTICED = 0.05


def covered(patient: Patient) -> Finding:
    """There are blocks, and the policy checkpoints some."""
    try:
        found = patient.found
    except NotApplicable as nothing:
        return failed(in_options(str(nothing.__cause__)).partition(". Name what")[0], _NAME_THEM)
    owners = _owners(patient)
    if len(owners) == len(found):
        reasons = ", ".join(sorted(set(owners.values())))
        return failed(
            f"{len(found)} blocks were found, and none is checkpointed here, since their owner does it: {reasons}",
            _one_of_the_two(owners),
        )
    with patient.under_policy() as handle:
        coverage = handle.report()
    if len(coverage.portions) == len(coverage.checkpointed) == 1 and coverage.share == 1:
        return warned(
            "one block is all of the model: its replay needs what the model does, and lowers no peak", _NAME_THEM
        )
    return passed(
        f"{len(coverage.checkpointed)} of {len(coverage.portions)} blocks, {coverage.share:.1%} of parameters"
    )


def left_out(patient: Patient) -> Finding:
    """What is kept all the same is less than what is let go."""
    coverage = patient.coverage
    names = {portion.name for portion in coverage.checkpointed}
    others = [(name, size) for name, size in coverage.kept if name not in names]
    kept = sum(size for _, size in coverage.kept)
    evidence = f"activations: {format_size(coverage.let_go)} let go, {format_size(kept)} kept"
    if not others:
        return passed(f"{evidence}, all of it inputs of blocks")
    name, most = others[0]
    evidence = f"{evidence}, {format_size(most)} of it by {name!r}"
    if most > coverage.let_go:
        return warned(evidence, f"checkpoint or shrink {name!r} first; see --blocks")
    return passed(evidence)


def owner(patient: Patient) -> Finding:
    """Nobody else checkpoints the same blocks."""
    owners = _owners(patient)
    if len(owners) == len(patient.found):
        raise NotApplicable("all of them are; see blocks covered")
    if not owners:
        return passed(f"{len(patient.found)} blocks, none checkpointed by the model itself")
    return warned(
        f"{some(list(owners))} are checkpointed by their owner and left alone: {next(iter(owners.values()))}",
        _one_of_the_two(owners),
    )


def _owners(patient: Patient) -> dict[str, str]:
    """What already checkpoints a block, in words, by the block's name."""
    return {name: found for name, _ in patient.found if (found := owner_of(patient.module, name))}


def _one_of_the_two(owners: dict[str, str]) -> str:
    switches = [switch for start, switch in _SWITCHES.items() if any(why.startswith(start) for why in owners.values())]
    ways = "; ".join(['existing="replace"', *switches])
    return f"one of the two is enough: train without the callback, or give it the blocks: {ways}"


def frozen(patient: Patient) -> Finding:
    """Every checkpointed block has something to save."""
    blocks = dict(patient.found)
    idle = [
        portion.name
        for portion in patient.coverage.checkpointed
        if not portion.let_go and not any(p.requires_grad for p in blocks[portion.name].parameters())
    ]
    if idle:
        return warned(
            f"{some(idle)} have no parameter that trains and save nothing: they run as they are",
            "nothing is lost; for a clean list name the others with --blocks",
        )
    return passed(f"{len(patient.coverage.checkpointed)} checkpointed blocks, each with something to save")


def worth(patient: Patient) -> Finding:
    """No block saves little and takes long to replay."""
    profile = patient.profile
    evidence = f"{format_size(profile.kept_bytes)} saved inside blocks, for {_ms(profile.replay_seconds)} of replay"
    noticed = [b for b in profile.blocks if b.replay_seconds * b.calls > _NOTICED * profile.replay_seconds]
    usual = statistics.median(map(_rate, profile.blocks))
    empty = [block.name for block in noticed if not block.kept_bytes]
    if empty:
        return warned(
            f"{evidence}; {some(empty)} keep nothing inside that is not the next block's input, and save no byte",
            'join blocks into segments: Full(segment_size="sqrt")',
        )
    poor = [block for block in noticed if _rate(block) * _POOR < usual]
    if not poor:
        return passed(evidence)
    one = min(poor, key=_rate)
    return warned(
        f"{some([block.name for block in poor])} save little and replay long: {one.name!r} "
        f"{format_size(one.kept_bytes)} in {_ms(one.replay_seconds)}; {evidence}",
        "leave them out: name the others with --blocks, or let a budget choose: --policy auto",
    )


def _rate(block: BlockProfile) -> float:
    """Bytes saved for each second of replay."""
    return block.kept_bytes / block.replay_seconds if block.replay_seconds else float("inf")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
