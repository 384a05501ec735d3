"""Show an offline run in `wandb leet`, and write what the terminal shows to docs/pictures/leet_gpt.txt and .svg.

    python benchmarks/leet.py            # trains the GPT example for 40 steps, then opens it in a terminal of its own
    python benchmarks/leet.py --draw     # the picture again, from the text

Needs `tmux`, in which the program runs as before a person: six figures are asked for, both sidebars are closed.
"""

import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import wandb
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, StepMonitor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import GPT, training  # noqa: E402

CAPTURE = ROOT / "docs/pictures/leet_gpt.txt"
PICTURE = CAPTURE.with_suffix(".svg")
COLUMNS, LINES = 110, 28
KEYS = "peak_rss|headroom|saved|recompute_ms|step_time|tokens_per"
STEPS = 40


def train(folder: str) -> Path:
    """Train the example offline, and return the run's folder."""
    logger = WandbLogger(save_dir=folder, project="lightning-ckpt", offline=True, settings=wandb.Settings(silent=True))
    data = training(context=32)[1].dataset[: 4 * STEPS]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[ActivationCheckpointing("full"), StepMonitor()],
        logger=logger,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(depth=4, width=64, heads=4, context=32), DataLoader(data, batch_size=4))
    logger.experiment.finish()
    return next(Path(folder).glob("wandb/offline-run-*"))


def capture(run: Path) -> str:
    """Return what a terminal shows of it."""
    server = f"leet-{os.getpid()}"
    program = Path(sys.executable).with_name("wandb")

    def tmux(*words: str) -> str:
        return subprocess.run(["tmux", "-L", server, *words], capture_output=True, text=True, check=True).stdout

    # A folder for its settings, in which no sidebar is closed yet: it remembers them.
    command = f"env WANDB_CONFIG_DIR={run} {program} leet run {run}"
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), command)
    try:
        time.sleep(6)
        for keys in (["/"], [KEYS, "Enter"], ["["], ["]"]):
            tmux("send-keys", *keys)
            time.sleep(1)
        time.sleep(3)
        shown = tmux("capture-pane", "-p")
    finally:
        tmux("kill-server")
    return "\n".join(line.rstrip() for line in shown.rstrip().splitlines() if line.strip()) + "\n"


def picture(shown: str) -> str:
    """Return what the terminal shows as a drawing of one."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(shown, markup=False, highlight=False, no_wrap=True, end="")
    drawn = console.export_svg(title="wandb leet run wandb/offline-run-…", unique_id="leet")

    # Each character has a place of its own: fonts lack some of these, and others fill in with other widths.
    def placed(run: re.Match[str]) -> str:
        step = 12.2
        return 'x="' + " ".join(f"{step * at:.0f}" for at in range(round(float(run[1]) / step))) + '"'

    return re.sub(r'x="0" (?=y=)(?=[^>]*textLength="([\d.]+)")', lambda run: placed(run) + " ", drawn) + "\n"


def main() -> int:
    if sys.argv[1:] == ["--draw"]:
        PICTURE.write_text(picture(CAPTURE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    if not shutil.which("tmux"):
        print("tmux is not installed: there is no terminal to look at", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        shown = capture(train(folder))
    CAPTURE.write_text(shown, encoding="utf-8")
    PICTURE.write_text(picture(shown), encoding="utf-8")
    print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
