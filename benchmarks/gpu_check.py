"""Everything that only an accelerator can show, by one command: its tests, and what checkpointing takes there.

    python benchmarks/gpu_check.py                        # writes benchmarks/results/gpu_check_<device>_<yyyymm>.*
    python benchmarks/gpu_check.py --device cpu --tiny    # the same way with tiny models, as a test does

Under eight minutes on one large GPU. It runs the tests marked `gpu`; trains GPT, GPT-2 of Hugging Face, ViT and U-Net
in bf16 under every way of checkpointing; holds estimates to the peaks that were measured, `BatchSizeTuner` to the
largest batch that really fits, found to 2 %; and times `StepMonitor`. A JSON file has every figure, a Markdown file the
tables. The tests and the GPT-2 need the extra `test`.

A section that fails leaves its error in the report, and the others go on; the exit code is then 1. A section for which
`--minutes` leaves too little time is left out, and the report says so.
"""

import argparse
import contextlib
import datetime
import gc
import json
import logging
import platform
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_cases import in_one_line
from gpu_page import page
from gpu_sections import ROOT, SECTIONS, Check, Section, device_name

from lightning_ckpt.memory import release_unused


def run_all(check: Check, sections: Mapping[str, Section], save: Callable[[], None]) -> bool:
    """Run the sections one after the other, and save after each; tell whether all that ran went well."""
    for name, section in sections.items():
        began = time.monotonic()
        left = check.left()
        if left < (0 if check.tiny else section.seconds):
            check.found[name] = {
                "left out": f"{max(0, left):.0f} s were left, and it takes up to {section.seconds:.0f} s"
            }
        else:
            print(f"{name} ...", flush=True)
            check.found[name] = _attempt(check, section)
        check.found[name]["seconds"] = time.monotonic() - began
        save()
    return not any(_failures(said) for said in check.found.values())


def _attempt(check: Check, section: Section) -> dict[str, Any]:
    try:
        return section.run(check)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": in_one_line(error), "traceback": traceback.format_exc()}
    finally:
        with contextlib.suppress(RuntimeError):  # a device that has failed for good fails here too
            release_unused(check.device)


def _failures(said: Mapping[str, Any]) -> list[Any]:
    cases = [name for name, case in said.get("cases", {}).items() if "error" in case]
    return [*said.get("failed", []), *cases, *(["the section"] if "error" in said else [])]


def about(check: Check, arguments: list[str]) -> dict[str, Any]:
    """What the figures are of."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    versions = installed("lightning-ckpt", "torch", "lightning", "transformers", "deepspeed")
    versions |= {"Python": platform.python_version()}
    if torch.version.cuda and check.device.type == "cuda":
        versions |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
    return {
        "device": device_name(check.device),
        "bytes_of_device": check.room or None,
        "peak_flops": check.peaks,
        "tiny": check.tiny,
        "versions": versions,
        "system": platform.platform(),
        "commit": commit.stdout.strip() or "unknown",
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "command": " ".join(["python benchmarks/gpu_check.py", *arguments]),
    }


def installed(*names: str) -> dict[str, str]:
    """The versions of those distributions that are here; a checkout on the path is none."""
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def chosen_device(asked: str | None) -> torch.device:
    """The device asked for, with its number, or the accelerator that is there.

    Raises:
        ValueError: it is not there, or has no memory of its own.
    """
    current = torch.accelerator.current_accelerator(check_available=True)
    kind = asked or (current.type if current else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if current is None or current.type != kind:
        here = f"a {current.type} device" if current else "no accelerator that this PyTorch can use"
        raise ValueError(f"--device {kind}: there is {here} here; --device cpu --tiny goes the same way on a CPU")
    if kind == "mps":
        raise ValueError("--device mps: its memory is the host's, with no peak to read; give --device cpu --tiny")
    return torch.device(kind, torch.accelerator.current_device_index())


def stem(check: Check) -> str:
    """The name of the files, without what tells JSON from Markdown."""
    name = "cpu" if check.device.type == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_name(check.device).lower())
    return f"gpu_check_{name}_{datetime.date.today():%Y%m}"


def main(arguments: list[str] | None = None, sections: Mapping[str, Section] = SECTIONS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda, xpu or another that has its own memory, or cpu; default: what is there")
    parser.add_argument("--tiny", action="store_true", help="tiny models, seconds instead of minutes")
    parser.add_argument("--minutes", type=float, default=8, help="leave out what takes longer than this, default 8")
    parser.add_argument("--only", nargs="+", choices=list(sections), metavar="SECTION", help=", ".join(sections))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="the folder of the report")
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    try:
        device = chosen_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if device.type == "cpu" and not args.tiny:
        parser.error("a CPU takes hours for models of this size: add --tiny")

    check = Check(device, args.tiny, until=time.monotonic() + 60 * args.minutes)
    report = about(check, arguments) | {"minutes": args.minutes, "sections": check.found}
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / stem(check)

    def save() -> None:
        file.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(page(report), encoding="utf-8")

    wanted = {name: section for name, section in sections.items() if name in (args.only or sections)}
    sound = run_all(check, wanted, save)
    print(page(report))
    print(f"written to {file}.json and {file}.md")
    return 0 if sound else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_ckpt", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # collections between measurements then pass over all that was imported
    sys.exit(main())
