"""The memory of a process on the host, as the kernel tells: resident size, peak, and what control groups leave."""

import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

log = logging.getLogger(__name__)

# Bytes that the kernel's own counters of one size may differ by, since each processor adds up by itself.
_AGREED = 2**18


class HostReader:
    """The resident size of this process, as the kernel keeps it.

    The peak is `VmHWM`, which Linux resets when "5" is written to `/proc/self/clear_refs`. Where that is not allowed
    the peak is the one since the process started, which is said once in the log. `getrusage` tells the same in a
    fraction of the time, but no less than the program had that started this one: it is taken at its word from the
    least that the two agreed on, clear of that. Pages the process gave back to its C library but not to the kernel
    still count: call `release_unused` before a measurement that has to be tight.

    Args:
        proc: where the kernel tells about this process.
        cgroup: where control groups are mounted.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._status = _KernelFile(proc / "self/status", os.O_RDONLY)
        self._clear_refs = _KernelFile(proc / "self/clear_refs", os.O_WRONLY | os.O_CREAT)
        self._can_reset = True
        self._floor = 0  # what `getrusage` told where it was less: it never tells less than that
        self._trusted: float = math.inf  # what `getrusage` tells is right from here on

    def reset_peak(self) -> None:
        """Start a new interval at the current resident size, where the kernel lets us."""
        if not self._can_reset:
            return
        try:
            # 5 resets the peak resident size and nothing else: proc(5), /proc/pid/clear_refs.
            self._clear_refs.write(b"5")
        except OSError as error:
            self._can_reset = False
            log.warning(
                "The host's peak memory can't be reset (%s): memory figures are the highest since this process "
                "started, not since the last logged step.",
                error,
            )

    def peak(self) -> int:
        """Return the highest resident bytes since the last reset.

        Raises:
            OSError: where the system tells neither in /proc nor through `getrusage`.
        """
        quick = _peak_of_rusage()
        if quick is not None and quick >= self._trusted:
            return quick
        peak = self._status.kib(b"VmHWM")
        if peak is not None and quick is not None:
            agreed = abs(quick - peak) <= _AGREED
            if agreed and quick - self._floor > _AGREED:
                self._trusted = quick
            elif quick > peak and not agreed:
                self._floor = quick
        return peak or _peak_since_start()

    def current(self) -> int:
        """Return the resident bytes now; where the kernel doesn't tell, the highest since the start."""
        return self._status.kib(b"VmRSS") or _peak_since_start()

    def limit(self) -> int | None:
        """Return what this process can hold now: its own resident bytes and those still to be had.

        To be had is what the kernel says is available without swapping, and no more than what the tightest control
        group above the process has left.
        """
        rooms = list(_group_rooms(self._proc, self._cgroup))
        available = _kib(self._proc / "meminfo", "MemAvailable")
        if available is not None:
            rooms.append(available)
        return self.current() + max(min(rooms), 0) if rooms else None


class _KernelFile:
    """A file about this process, kept open: to open it takes many times as long as to read it.

    Args:
        path: which file.
        flags: how it is opened.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._path, self._flags = path, flags
        self._file: int | None = None
        self._process = 0

    def write(self, content: bytes) -> None:
        os.pwrite(self._opened(), content, 0)

    def kib(self, name: bytes) -> int | None:
        """Return the number behind `name:`, in kB, as bytes; None where there is no such file or number."""
        try:
            _, found, after = os.pread(self._opened(), 4096, 0).partition(name + b":")
        except OSError:
            return None
        return int(after.split(None, 1)[0]) * 1024 if found else None

    def _opened(self) -> int:
        if self._file is None or self._process != os.getpid():  # a forked process has files of its own
            self._file, self._process = os.open(self._path, self._flags), os.getpid()
        return self._file

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _peak_since_start() -> int:
    """`getrusage`'s peak, where /proc does not tell."""
    peak = _peak_of_rusage()
    if peak is None:
        raise OSError(
            "this system does not tell the peak memory of a process; measure with a reader of your own: "
            "`with lightning_ckpt.memory.use_reader(reader):`"
        )
    return peak


def _peak_of_rusage() -> int | None:
    try:
        import resource  # Windows has no such module
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _entry(path: Path, name: str) -> int | None:
    """Return the number behind `name` in a kernel file of `name: number` or `name number` lines."""
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _kib(path: Path, name: str) -> int | None:
    number = _entry(path, name)
    return None if number is None else number * 1024


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


def _group_rooms(proc: Path, mount: Path) -> Iterator[int]:
    """Yield the bytes left in each control group above the process that has a limit (cgroup v2, then v1)."""
    paths = _group_paths(proc)
    for base, limit, usage, cache in (
        (mount, "memory.max", "memory.current", "inactive_file"),
        (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group in _with_parents(paths.get("memory" if base != mount else "", "/")):
            folder = base / group
            most, used = _number(folder / limit), _number(folder / usage)
            if most is None or used is None:
                continue
            # The kernel drops file pages nobody has touched lately before it refuses memory.
            yield most - used + (_entry(folder / "memory.stat", cache) or 0)


def _group_paths(proc: Path) -> dict[str, str]:
    """Return the process's group by controller, "" for cgroup v2, from `id:controllers:path` lines."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split(":", 2) for line in lines)
    return {name: row[2] for row in rows if len(row) == 3 for name in row[1].split(",")}


def _with_parents(path: str) -> Iterator[str]:
    """Yield the group and every group above it, down to the mount's root ("")."""
    group = PurePosixPath(path.lstrip("/"))
    yield from dict.fromkeys([str(group), *(str(parent) for parent in group.parents), "."])
