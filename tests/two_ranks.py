"""A function on two processes, or as many as asked for, as `torchrun` would start them."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch

# What ranks need, imported once, in a process that each of them is forked from: it takes seconds, and forking none.
_IMPORTED = ("lightning.pytorch", "lightning_ckpt", "torch.distributed.fsdp", "scipy.optimize", "rich.table")


def on_two_ranks(work: Callable[..., None], *args: Any) -> None:
    """Call `work(rank, *args)` in each of two processes of one node; an error of either is raised here."""
    on_ranks(2, work, *args)


def on_ranks(count: int, work: Callable[..., None], *args: Any) -> None:
    """Call `work(rank, *args)` in each of so many processes of one node; an error of any is raised here."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))
    torch.multiprocessing.start_processes(
        _start, (port, count, dict(os.environ), work, args), nprocs=count, start_method="forkserver"
    )


def _start(
    rank: int, port: int, count: int, here: dict[str, str], work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ |= here | {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    torch.set_num_threads(1)
    work(rank, *args)
