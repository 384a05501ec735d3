"""What a stranger can import, and what an import costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_ckpt

NAMES = {
    "ActivationCheckpointing",
    "BatchSizeTuner",
    "Full",
    "MemoryBudget",
    "SelectiveOps",
    "StepMonitor",
    "checkpoint_blocks",
    "estimate_memory",
    "find_blocks",
    "is_recomputing",
    "profile_blocks",
    "verify_gradients",
}

NOT_AT_IMPORT = {"wandb", "scipy", "matplotlib", "lightning", "sklearn", "transformers"}


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these() -> None:
    """A name that appears or disappears is noticed, and each can be imported."""
    assert set(lightning_ckpt.__all__) == NAMES
    assert all(getattr(lightning_ckpt, name).__name__ == name for name in NAMES)


def test_the_names_are_listed_before_they_are_loaded() -> None:
    """Completion in an editor sees every name in a fresh process."""
    listed = in_a_new_process("import lightning_ckpt; print(*dir(lightning_ckpt))").split()
    assert set(listed) >= NAMES


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    """A typing mistake gets the list of what there is."""
    with pytest.raises(AttributeError, match=r"no attribute 'Fulll'; public names: ActivationCheckpointing, .*Full"):
        lightning_ckpt.Fulll  # noqa: B018 - looked up for its error


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Neither loggers, solvers and plots, nor Lightning, nor PyTorch itself."""
    code = "import sys, lightning_ckpt; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    assert not set(in_a_new_process(code).split()) & (NOT_AT_IMPORT | {"torch"})


def test_the_core_needs_neither_lightning_nor_a_logger() -> None:
    """A bare loop that checkpoints blocks loads PyTorch only, and touches no device."""
    code = (
        "import sys; from lightning_ckpt import checkpoint_blocks, find_blocks, is_recomputing, Full, SelectiveOps;"
        "import torch; assert not torch.cuda.is_initialized();"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    assert not set(in_a_new_process(code).split()) & NOT_AT_IMPORT


def test_the_callbacks_do_not_load_wandb_or_a_device() -> None:
    """W&B comes with a W&B logger, and a device with a trainer."""
    code = (
        "import sys; from lightning_ckpt import ActivationCheckpointing, StepMonitor, BatchSizeTuner;"
        "ActivationCheckpointing(), StepMonitor(), BatchSizeTuner();"
        "import torch; assert not torch.cuda.is_initialized(); print('wandb' in sys.modules)"
    )
    assert in_a_new_process(code) == "False"


@pytest.mark.parametrize(("arguments", "code"), [(["explain", "--layers", "4"], 0), (["explain", "--layers", "0"], 2)])
def test_the_command_line_by_the_interpreter_at_hand(arguments: list[str], code: int) -> None:
    """`python -m lightning_ckpt` prints and returns what `lightning-ckpt` does."""
    program = str(Path(sys.executable).with_name("lightning-ckpt"))
    module, script = (
        subprocess.run([*start, *arguments], capture_output=True, text=True, check=False)
        for start in ([sys.executable, "-m", "lightning_ckpt"], [program])
    )
    assert module.returncode == script.returncode == code
    assert module.stdout + module.stderr == script.stdout + script.stderr != ""
