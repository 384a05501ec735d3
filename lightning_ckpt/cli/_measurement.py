"""What training steps under one policy took, as numbers that travel as JSON between processes; no torch."""

import statistics
from dataclasses import asdict, dataclass, fields
from typing import Any

# What memory is held for, in the order in which it is drawn: what no policy changes first.
CAUSES = ("parameters", "optimizer state", "gradients", "activations")
PHASES = ("forward", "backward", "optimizer")
# The line that a measuring process prints for each timed step. The user's own code prints there too.
STEP = "\x1elightning-ckpt: step"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        target: as the user wrote it.
        policy: as the user wrote it.
        steps: how many to time.
        seed: of weights, data and dropout.
        blocks: what to checkpoint, class names and globs; None for the repeated blocks.
        precision: of the Trainer, such as `"bf16-mixed"`; None for its default.
        needs_blocks: whether training that checkpoints nothing ends at once where there is no block, because policies
            that need some are measured after it.
    """

    target: str
    policy: str
    steps: int
    seed: int
    blocks: list[str] | None = None
    precision: str | None = None
    needs_blocks: bool = False


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of PyTorch's tensors over one training step.

    Attributes:
        peak: the highest, in bytes.
        causes: what the bytes of the peak were held for, by the names of `CAUSES`. Buffers count as parameters, and
            everything that is none of the others, such as scratch memory, as activations.
        curve: (place in the step, bytes held), rising in place, 0 to 1; thinned, with every peak kept. Empty where the
            device tells no more than its peak.
        phases: where forward, backward and the rest of the step end, 0 to 1.
    """

    peak: int
    causes: dict[str, int]
    curve: list[tuple[float, int]]
    phases: list[float]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What training steps under one policy took.

    Attributes:
        policy: as it was written.
        blocks: how many blocks were checkpointed.
        seconds: of each timed step: forward, backward, optimizer step.
        samples: in a batch; None where nobody can tell.
        elements: in the largest tensor of the batch.
        memory: of one more step.
        loss: of the first step.
        digests: of the loss and of every gradient of the first step, by name.
        device: what it ran on, in words.
        on_host: whether that is a CPU, where equal means bit for bit.
        versions: of what it ran with, by name.
    """

    policy: str
    blocks: int
    seconds: list[float]
    samples: int | None
    elements: int
    memory: StepMemory
    loss: float
    digests: dict[str, str]
    device: str
    on_host: bool
    versions: dict[str, str]

    @property
    def step_time(self) -> float:
        """The median of the timed steps, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the timed steps, in seconds."""
        if len(self.seconds) < 2:
            return self.step_time, self.step_time
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def samples_per_second(self) -> float | None:
        """Samples a second at the median step time."""
        return None if self.samples is None else self.samples / self.step_time

    def differences(self, plain: "Measurement") -> list[str]:
        """The names of the loss and gradients that are not bit for bit those of plain training."""
        names = dict.fromkeys([*plain.digests, *self.digests])
        return [name for name in names if self.digests.get(name) != plain.digests.get(name)]

    def as_json(self) -> dict[str, Any]:
        """As plain lists, dicts and numbers: sizes in bytes, times in seconds."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Measurement":
        """What `as_json` gave."""
        memory = value["memory"] | {"curve": [(place, held) for place, held in value["memory"]["curve"]]}
        return Measurement(**(value | {"memory": StepMemory(**memory)}))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The policies that were measured on one target, against plain training.

    Attributes:
        target: as the user wrote it.
        seed: of weights, data and dropout.
        measured: in the order asked for.
        failed: why a policy could not be measured, by how it is written.
    """

    target: str
    seed: int
    measured: tuple[Measurement, ...]
    failed: dict[str, str]

    @property
    def plain(self) -> Measurement | None:
        """Plain training; None where it could not be measured."""
        return next((one for one in self.measured if one.policy == "none"), None)

    @property
    def equal(self) -> bool:
        """Whether every policy gave the loss and gradients of plain training, bit for bit."""
        plain = self.plain
        return plain is not None and not any(one.differences(plain) for one in self.measured)

    def frontier(self) -> tuple[Measurement, ...]:
        """The measurements that no other one beats in both step time and peak memory, the fastest first."""
        best: list[Measurement] = []
        for one in sorted(self.measured, key=lambda m: (m.step_time, m.memory.peak)):
            if not best or one.memory.peak < best[-1].memory.peak:
                best.append(one)
        return tuple(best)

    def as_json(self) -> dict[str, Any]:
        """As plain lists, dicts and numbers: sizes in bytes, times in seconds."""
        plain = self.plain
        return {
            "target": self.target,
            "seed": self.seed,
            "policies": [one.as_json() | _against(one, plain) for one in self.measured],
            "frontier": [one.policy for one in self.frontier()],
            "failed": self.failed,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Comparison":
        """What `as_json` gave."""
        names = {field.name for field in fields(Measurement)}
        rows = ({name: one[name] for name in names} for one in value["policies"])
        measured = tuple(map(Measurement.from_json, rows))
        return Comparison(target=value["target"], seed=value["seed"], measured=measured, failed=value["failed"])


def _against(one: Measurement, plain: Measurement | None) -> dict[str, Any]:
    """What can be said of a measurement by itself, and beside plain training."""
    said: dict[str, Any] = {"step_time": one.step_time, "spread": list(one.spread)}
    said["samples_per_second"] = one.samples_per_second
    if plain is not None:
        said["step_time_ratio"] = one.step_time / plain.step_time
        said["peak_ratio"] = one.memory.peak / plain.memory.peak
        said["different"] = one.differences(plain)
    return said
