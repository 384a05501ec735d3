"""Checks of what checkpointing gains and costs: what memory is made of, attention, caches, headroom, time."""

from collections.abc import Iterable
from itertools import islice

from lightning_ckpt.caches import caching_parts, outermost, trained_caching_parts
from lightning_ckpt.causes import WHAT_ELSE_HELPS
from lightning_ckpt.cli._findings import Finding, NotApplicable, OutOfMemory, failed, passed, some, warned
from lightning_ckpt.cli._measurement import CAUSES, Measurement
from lightning_ckpt.cli._patient import Patient
from lightning_ckpt.cli._target import elements_in
from lightning_ckpt.memory import reader_for
from lightning_ckpt.policies import SelectiveOps
from lightning_ckpt.sizes import format_size

# Below this share of the plain peak, activations are not what to save on.
_LITTLE = 0.25
# Above this share of the memory there is, fragmentation or a longer batch ends the run.
_TIGHT = 0.9
# Below this share of the FLOPs, to keep the results of attention saves little replay.
_LITTLE_WORK = 0.1
# With fewer timed steps quartiles tell little.
_FEW = 8
_SCANNED = 256  # batches of the loader that are looked at


def activations(patient: Patient) -> Finding:
    """Activations are what fills the memory of plain training."""
    memory = patient.plain.memory
    share = memory.causes["activations"] / memory.peak
    listed = ", ".join(f"{cause} {format_size(memory.causes[cause])}" for cause in CAUSES[:-1])
    evidence = (
        f"activations are {format_size(memory.causes['activations'])} of a plain peak of {format_size(memory.peak)}, "
        f"{share:.0%}; {listed}"
    )
    return passed(evidence) if share >= _LITTLE else warned(evidence, WHAT_ELSE_HELPS)


def caches(patient: Patient) -> Finding:
    """No key-value cache is filled in training."""
    on = caching_parts(patient.module)
    if not on:
        return passed("no part of the model has use_cache on")
    with patient.under_policy() as handle:
        turned_off = trained_caching_parts(patient.module, handle.blocks)
    if filled := outermost(on.keys() - turned_off.keys()):
        return warned(
            f"use_cache is on in {_named(filled)}: a forward in training keeps keys and values that nobody reads",
            "model.config.use_cache = False",
        )
    return passed(
        f"use_cache is on in {_named(outermost(on))}, and turned off in training while blocks are checkpointed"
    )


def _named(parts: list[str]) -> str:
    return some([name or "the model" for name in parts])


def attention(patient: Patient) -> Finding:
    """Attention keeps no matrix, and its results are worth keeping where the policy keeps them."""
    watched, policy = patient.watched, patient.conditions.policy
    if watched.matrices:
        return warned(
            f"attention keeps its matrix, {format_size(watched.matrices.total())} in {len(watched.matrices)} blocks",
            "torch.nn.functional.scaled_dot_product_attention, in Hugging Face attn_implementation='sdpa'; on a CPU no "
            "fused kernel takes dropout",
        )
    selects = isinstance(policy, SelectiveOps) and policy.save == "attention"
    if not watched.kernels:
        if selects:
            return warned('no attention kernel ran, so SelectiveOps("attention") replays everything', 'policy="full"')
        return passed("no attention kernel and no attention matrix in the forward")
    share = watched.attention_flops / watched.flops if watched.flops else 0.0
    evidence = f"{watched.kernels} fused attention kernels keep no matrix; they are {share:.1%} of the forward's FLOPs"
    if selects and share < _LITTLE_WORK:
        return warned(f"{evidence}, so keeping their results saves little replay", 'policy="full" or "selective"')
    return passed(evidence)


def headroom(patient: Patient) -> Finding:
    """The longest batch fits too."""
    try:
        memory, elements = patient.checkpointed.memory, patient.checkpointed.elements
    except OutOfMemory as error:
        return failed(f"not even the first batch fits: {error}", "a smaller batch, or a policy that keeps less")
    limit = patient.conditions.memory_limit or reader_for(patient.device).limit()
    if limit is None or not elements:
        raise NotApplicable("this device does not tell its memory" if limit is None else "no tensor in the batch")
    longest, count = _longest(patient.target.loader())
    growth = max(1.0, longest / elements)
    needed = memory.peak + memory.causes["activations"] * (growth - 1)
    which = "the one batch" if count == 1 else f"the longest of {count} batches"
    evidence = (
        f"{which} has {longest:,} elements, {growth:.2f} times the measured one: about {format_size(needed)} of "
        f"{format_size(limit)}, if activations grow alike"
    )
    if needed <= _TIGHT * limit:
        return passed(evidence)
    cure = "sort or cap lengths, or BatchSizeTuner(headroom=...) with more of it"
    return failed(evidence, cure) if needed > limit else warned(evidence, cure)


def _longest(batches: Iterable[object]) -> tuple[int, int]:
    """The elements of the largest batch among the first ones, and how many were looked at."""
    sizes = [elements_in(batch) for batch in islice(iter(batches), _SCANNED)]
    return max(sizes, default=0), len(sizes)


def slowdown(patient: Patient) -> Finding:
    """Checkpointed steps take not much longer than plain ones."""
    plain, ours = patient.plain.step_time, patient.checkpointed.step_time
    if not patient.checkpointed.blocks:
        raise NotApplicable("no block is checkpointed")
    most = patient.conditions.max_slowdown
    evidence = f"a step takes {1000 * ours:.1f} ms, {ours / plain:.2f} times the plain one's {1000 * plain:.1f} ms"
    evidence += _replay(patient)
    if ours <= most * plain:
        return passed(evidence)
    evidence += f"; accepted are {most:g}"
    if _within_the_spread(patient.plain, patient.checkpointed, most):
        return warned(
            f"{evidence}, but {len(patient.plain.seconds)} steps spread too much to tell",
            "time more of them: --steps 50",
        )
    return failed(
        evidence,
        'recompute less: "selective", Full(every=2), or policy="auto", which buys time with the memory there is',
    )


def _within_the_spread(plain: Measurement, ours: Measurement, most: float) -> bool:
    """Whether steps as they were seen, the checkpointed at their quickest and the plain at their slowest, are accepted.

    Of few steps that is the extremes, and of more the quartiles.
    """
    few = len(plain.seconds) < _FEW
    quick, slow = (min(ours.seconds), max(plain.seconds)) if few else (ours.spread[0], plain.spread[1])
    return quick <= most * slow


def _replay(patient: Patient) -> str:
    """What the replays alone take, where they can be measured."""
    try:
        seconds = patient.profile.replay_seconds
    except NotApplicable:
        return ""
    return f", with {1000 * seconds:.3g} ms of replay when measured alone"
