"""Peaks are read where they are, intervals start where they are told to, and limits are what a process can hold."""

import gc
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from lightning_ckpt import host_memory
from lightning_ckpt.memory import (
    AcceleratorReader,
    AllocatorReader,
    ExactHostReader,
    HostReader,
    Interval,
    MemoryReader,
    _same_memory,
    reader_for,
    release_unused,
    use_reader,
)

MIB = 2**20


def tensor_of(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


class TestAllocatorReader:
    def test_peak_is_the_highest_running_sum(self) -> None:
        """Three tensors of which two live at once peak at the larger pair, to the byte."""
        with AllocatorReader() as reader:
            first = tensor_of(3000)
            second = tensor_of(2000)
            del first
            third = tensor_of(500)
            assert reader.peak() == 5000
            assert reader.current() == 2500
            del second, third

    def test_reset_starts_at_what_is_held(self) -> None:
        """After a reset the peak is what lives now, and only later allocations raise it."""
        with AllocatorReader() as reader:
            held = tensor_of(1000)
            brief = tensor_of(9000)
            del brief
            reader.reset_peak()
            assert reader.peak() == 1000
            more = tensor_of(200)
            assert reader.peak() == 1200
            del held, more

    def test_sees_the_backward_pass(self) -> None:
        """Gradients and the buffers of a backward pass are counted like everything else."""
        weight = torch.ones(64, 64, requires_grad=True)
        loss = (torch.ones(8, 64) @ weight).sum()
        with AllocatorReader() as reader:
            loss.backward()
            assert reader.peak() >= weight.nbytes
            assert weight.grad is not None
            assert reader.current() == weight.grad.nbytes

    def test_reading_in_between_loses_nothing(self) -> None:
        """Sums read at every step equal the sums of one reading at the end."""

        def run(read: Callable[[], object]) -> None:
            kept = []
            for size in (100, 700, 300):
                kept.append(tensor_of(size))
                tensor_of(2 * size)
                read()

        with AllocatorReader() as often:
            run(often.peak)
            assert often.peak() == 100 + 700 + 1400
        with AllocatorReader() as once:
            run(lambda: None)
            assert once.peak() == often.peak()
            assert once.current() == often.current() == 0

    def test_peak_outlives_the_context(self) -> None:
        """The figure can be read after the profiled block has ended, and later tensors don't change it."""
        with AllocatorReader(limit=5) as reader:
            tensor_of(4096)
        tensor_of(8192)
        assert reader.peak() == 4096
        assert reader.limit() == 5

    def test_entered_anew_starts_at_zero(self) -> None:
        """One reader may measure twice; the second figure does not include the first."""
        reader = AllocatorReader()
        with reader:
            tensor_of(4096)
        with reader:
            tensor_of(16)
        assert reader.peak() == 16

    def test_left_twice_it_has_ended_once(self) -> None:
        """Whoever closes what is closed already changes no figure."""
        with AllocatorReader() as reader:
            tensor_of(4096)
        reader.__exit__(None, None, None)
        assert reader.peak() == 4096

    def test_entering_twice_at_once_is_refused(self) -> None:
        """Nesting a reader in itself would double count; the error says what to do."""
        with AllocatorReader() as reader, pytest.raises(RuntimeError, match="make a second one"):
            reader.__enter__()

    def test_two_profilers_at_once_are_refused(self) -> None:
        """PyTorch ends the first profiler when a second one starts: said in words before any figure is wrong."""
        with AllocatorReader() as outer:
            with pytest.raises(RuntimeError, match=r"a profiler is running already.*leave that one first"):
                AllocatorReader().__enter__()
            tensor_of(64)
            assert outer.peak() == 64
        with profile(), pytest.raises(RuntimeError, match="a profiler is running already"):
            AllocatorReader().__enter__()

    def test_can_be_read_within_an_optimizer_step(self) -> None:
        """Lightning runs the whole training step in one; the C library checks its heap, and freed memory is junk."""
        script = """
            import torch
            from lightning_ckpt.memory import AllocatorReader

            weight = torch.ones(64, 64, requires_grad=True)
            optimizer = torch.optim.SGD([weight])
            made = []

            def closure():
                reader.reset_peak()
                (torch.ones(8, 64) @ weight).sum().backward()
                made.append([object() for _ in range(1000)])
                del made[:-3]
                assert reader.peak() >= weight.nbytes

            with AllocatorReader() as reader:
                for _ in range(100):
                    optimizer.step(closure)
                    reader.peak()
        """
        checked = {**os.environ, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "85"}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, env=checked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_memory_of_before_does_not_count(self) -> None:
        """Nor its end: of a tensor that an earlier recording has seen, or of one at such a tensor's old address."""
        with AllocatorReader():
            seen = tensor_of(3000)
            gone = [tensor_of(1000) for _ in range(100)]
        del gone
        unseen = [tensor_of(990) for _ in range(100)]
        with AllocatorReader() as reader:
            del seen, unseen
            assert reader.current() == reader.peak() == 0

    def test_collection_is_left_as_found(self) -> None:
        """Reading suspends garbage collection for an instant only, and not where the user has turned it off."""
        with AllocatorReader() as reader:
            reader.peak()
            assert gc.isenabled()
            gc.disable()
            try:
                reader.peak()
                assert not gc.isenabled()
            finally:
                gc.enable()


def host(tmp_path: Path, *, group: str = "0::/\n", **files: str) -> HostReader:
    """A machine made of files: 1000 KiB resident, 3000 KiB at its highest, 5000 KiB available."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    texts = {
        "proc/self/status": "Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    1000 kB\n",
        "proc/self/cgroup": group,
        "proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  5000 kB\n",
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostReader(proc=proc, cgroup=mount)


class TestHostReader:
    def test_peak_and_current(self, tmp_path: Path) -> None:
        """The kernel's kibibytes come out as bytes."""
        reader = host(tmp_path)
        assert (reader.peak(), reader.current()) == (3000 * 1024, 1000 * 1024)

    def test_the_quick_call_counts_where_it_is_right(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`getrusage` is asked alone from the least that /proc agreed with, and not where it tells of a parent.

        The parent had 3000 KiB, which this process comes near to, passes, and falls below again.
        """
        reader = host(tmp_path)
        peaks = []
        for quick, exact in (
            (3000, 1000),
            (3000, 2900),
            (3000, 2000),
            (8000, 9000),
            (8000, 4000),
            (9000, 9000),
            (9500, 1),
            (3000, 2000),
        ):
            (tmp_path / "proc/self/status").write_text(f"VmHWM:  {exact} kB\n")
            monkeypatch.setattr(host_memory, "_peak_of_rusage", lambda quick=quick: quick * 1024)
            peaks.append(reader.peak() // 1024)
        assert peaks == [1000, 2900, 2000, 9000, 4000, 9000, 9500, 2000]

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs a Linux kernel's /proc")
    def test_a_large_program_that_started_this_one_does_not_count(self) -> None:
        """`getrusage` of a child begins at the size of its parent; the reader does not."""
        child = "from lightning_ckpt.host_memory import HostReader; print(HostReader().peak())"
        held = torch.ones(1 << 30, dtype=torch.uint8)
        done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
        assert int(done.stdout) < held.nbytes

    def test_reset_writes_five(self, tmp_path: Path) -> None:
        """5 is the code that resets the peak and touches nothing else."""
        host(tmp_path).reset_peak()
        assert (tmp_path / "proc/self/clear_refs").read_text() == "5"

    def test_says_once_when_it_cannot_reset(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Where the kernel forbids the reset, the log says once that figures are since the start."""
        reader = host(tmp_path)
        (tmp_path / "proc/self/clear_refs").mkdir()
        with caplog.at_level(logging.WARNING):
            reader.reset_peak()
            reader.reset_peak()
        assert [record.message for record in caplog.records] == [caplog.records[0].message]
        assert "since this process started, not since the last logged step" in caplog.text

    def test_limit_without_a_group(self, tmp_path: Path) -> None:
        """Own resident bytes and all that is available."""
        assert host(tmp_path).limit() == 6000 * 1024

    @pytest.mark.parametrize(
        ("group", "files"),
        [
            pytest.param(
                "0::/job/run\n",
                {
                    "cgroup__job__memory.max": str(3000 * 1024),
                    "cgroup__job__memory.current": str(2000 * 1024),
                    "cgroup__job__memory.stat": f"anon 7\ninactive_file {500 * 1024}\n",
                    "cgroup__job__run__memory.max": "max\n",
                    "cgroup__job__run__memory.current": "12",
                },
                id="v2-parent",
            ),
            pytest.param(
                "0::/seen/from/outside\n",
                {
                    "cgroup__memory.max": str(2500 * 1024),
                    "cgroup__memory.current": str(1000 * 1024),
                },
                id="v2-root-of-a-container",
            ),
            pytest.param(
                "5:devices:/\n4:cpu,memory:/job\n0::/\n",
                {
                    "cgroup__memory__job__memory.limit_in_bytes": str(3000 * 1024),
                    "cgroup__memory__job__memory.usage_in_bytes": str(2000 * 1024),
                    "cgroup__memory__job__memory.stat": f"inactive_file 1\ntotal_inactive_file {500 * 1024}\n",
                    "cgroup__memory__memory.limit_in_bytes": str(2**63 - 4096),
                    "cgroup__memory__memory.usage_in_bytes": "0",
                },
                id="v1",
            ),
        ],
    )
    def test_limit_is_capped_by_the_tightest_group(self, tmp_path: Path, group: str, files: dict[str, str]) -> None:
        """What the control group has left (1500 KiB here), not what the machine has, is what can still be had."""
        assert host(tmp_path, group=group, **files).limit() == (1000 + 1500) * 1024

    def test_limit_is_never_below_what_is_held(self, tmp_path: Path) -> None:
        """A group over its limit leaves no room, and not a negative one."""
        files = {"cgroup__memory.max": "1000", "cgroup__memory.current": "9000"}
        assert host(tmp_path, **files).limit() == 1000 * 1024

    def test_unknown_machine(self, tmp_path: Path) -> None:
        """Without /proc the limit is unknown, and the peak is the one the system's own call gives."""
        reader = HostReader(proc=tmp_path / "none", cgroup=tmp_path / "none")
        assert reader.limit() is None
        assert reader.peak() > MIB

    def test_a_system_that_tells_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the module for the system's own call, as on Windows: an error says how to measure all the same."""
        monkeypatch.setitem(sys.modules, "resource", None)
        text = (
            "does not tell the peak memory of a process; measure with a reader of your own: `with lightning_ckpt.memory"
        )
        with pytest.raises(OSError, match=text):
            HostReader(proc=tmp_path / "none").peak()
        assert host(tmp_path).peak() == 3000 * 1024

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs a Linux kernel's /proc")
    def test_follows_the_real_process(self) -> None:
        """64 MiB written and freed show in this interval's peak, and not in the next one's."""
        reader = HostReader()
        release_unused("cpu")
        reader.reset_peak()
        before = reader.peak()
        big = tensor_of(64 * MIB)
        assert reader.peak() >= before + 63 * MIB
        del big
        release_unused("cpu")
        reader.reset_peak()
        if reader._can_reset:
            assert reader.peak() < before + 32 * MIB
        limit = reader.limit()
        assert limit is not None
        assert limit > reader.current()


def test_exact_bytes_come_on_top_of_what_is_resident(tmp_path: Path) -> None:
    """What PyTorch allocates from the entry on is added to the host's figure of then; the limit is the host's."""
    resident = host(tmp_path)
    with ExactHostReader(resident) as reader:
        (tmp_path / "proc/self/status").write_text("VmRSS:\t    1500 kB\n")
        held = tensor_of(500)
        tensor_of(300)
        assert reader.peak() == 1000 * 1024 + held.nbytes + 300
        reader.reset_peak()
        assert reader.peak() == 1000 * 1024 + held.nbytes
        assert reader.limit() == resident.limit() == 6500 * 1024


class TestReaderFor:
    def test_the_cpu_is_read_from_the_host(self) -> None:
        """Without an override, the CPU's reader is the host's."""
        assert isinstance(reader_for("cpu"), HostReader)

    def test_overrides_nest(self) -> None:
        """The innermost reader is used for every device, and the outer one is back after it."""
        outer, inner = AllocatorReader(), AllocatorReader()
        with use_reader(outer) as given:
            assert given is outer
            with use_reader(inner):
                assert reader_for(torch.device("cpu")) is inner
                assert reader_for("cuda:3") is inner
            assert reader_for("cpu") is outer
        assert isinstance(reader_for("cpu"), HostReader)

    def test_an_exception_ends_the_override(self) -> None:
        """A failed measurement doesn't leave its reader behind."""
        with pytest.raises(KeyError), use_reader(AllocatorReader()):
            raise KeyError
        assert isinstance(reader_for("cpu"), HostReader)

    def test_what_is_no_reader_is_refused(self) -> None:
        """The error names the value and the methods a reader has."""
        with pytest.raises(TypeError, match=r"use_reader: 17 is no MemoryReader; .*reset_peak\(\), peak\(\)"):
            use_reader(17).__enter__()  # type: ignore[arg-type]

    @pytest.mark.parametrize("reader", [AllocatorReader(), HostReader(), AcceleratorReader("cuda")])
    def test_all_follow_the_protocol(self, reader: object) -> None:
        """Each reader can stand in for any other."""
        assert isinstance(reader, MemoryReader)


def test_a_device_named_by_its_type_alone_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells the share that a process may take by a device's number only."""

    class Backend:
        @staticmethod
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            return 6 * MIB, 10 * MIB

        @staticmethod
        def get_per_process_memory_fraction(index: int) -> float:
            return {1: 0.5, 3: 0.75}[index]

    monkeypatch.setattr(torch, "get_device_module", lambda device: Backend)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 2 * MIB)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert [AcceleratorReader(name).limit() for name in ("cuda", "cuda:1", "cuda:3")] == [5 * MIB, 5 * MIB, 7.5 * MIB]


def test_a_backend_that_does_not_tell_its_free_memory_has_no_limit() -> None:
    """Metal's is one, and its module is there on any machine."""
    assert AcceleratorReader("mps").limit() is None


@pytest.mark.parametrize(
    ("other", "same"), [("cuda:1", True), ("cuda", True), ("cuda:0", False), ("xpu:1", False), ("cpu", False)]
)
def test_readers_of_one_accelerator_read_the_same_memory(
    other: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reader of the device, also by its type alone; not another device, nor the host."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    reader = HostReader() if other == "cpu" else AcceleratorReader(other)
    assert _same_memory(AcceleratorReader("cuda:1"), reader) is same


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestAcceleratorReader:
    def test_counts_the_device(self) -> None:
        """A tensor raises the peak by its bytes, a reset brings it down, and reserved is at least allocated."""
        reader = reader_for("cuda")
        assert isinstance(reader, AcceleratorReader)
        reader.reset_peak()
        before = reader.peak()
        big = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert reader.peak() == before + big.nbytes
        assert reader.counters().reserved >= reader.counters().peak == reader.peak()
        del big
        reader.reset_peak()
        assert reader.peak() == before
        assert reader.counters().alloc_retries >= 0
        assert reader.counters().ooms >= 0

    def test_limit_does_not_count_the_cache_twice(self) -> None:
        """Reserved but unused memory is this process's own to use: filling the cache doesn't lower the limit."""
        reader = AcceleratorReader("cuda")
        release_unused("cuda")
        before = reader.limit()
        big = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        del big
        after = reader.limit()
        assert before is not None
        assert after is not None
        assert abs(after - before) <= 4 * MIB
        assert after <= torch.cuda.get_device_properties("cuda").total_memory

    def test_release_empties_the_cache(self) -> None:
        """Nothing stays reserved that holds no tensor."""
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        release_unused("cuda")
        assert torch.cuda.memory_reserved() < 256 * MIB


class Meter:
    """A reader whose use a test sets."""

    def __init__(self) -> None:
        self.now = self.highest = 0

    def use(self, size: int) -> None:
        self.now, self.highest = size, max(self.highest, size)

    def reset_peak(self) -> None:
        self.highest = self.now

    def peak(self) -> int:
        return self.highest

    def limit(self) -> int | None:
        return None


def test_intervals_of_one_reader_have_peaks_of_their_own() -> None:
    """A peak inside a short interval is still the peak of the long one around it, and of no later one."""
    meter = Meter()
    step, phase = Interval(meter), Interval(meter)
    step.reset_peak()
    phase.reset_peak()
    meter.use(70)
    meter.use(20)
    assert phase.peak() == 70
    phase.reset_peak()
    meter.use(50)
    assert (phase.peak(), step.peak()) == (50, 70)
    meter.use(10)
    step.reset_peak()
    assert (phase.peak(), step.peak()) == (50, 10)


def test_intervals_of_other_readers_are_left_alone() -> None:
    """Only what reads the same memory is told of a reset."""
    one, other = Meter(), Meter()
    ours, theirs = Interval(one), Interval(other)
    one.use(5)
    other.use(7)
    ours.reset_peak()
    one.use(1)
    assert (theirs.peak(), other.highest) == (7, 7)
