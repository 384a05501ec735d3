"""A run that ends for lack of memory says what it knew; the error comes through, and other errors are left alone."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.callbacks import _memory_snapshot
from lightning_ckpt.callbacks._oom_report import Failure, OutOfMemoryReport, tell
from lightning_ckpt.memory import GIB, use_reader
from lightning_ckpt.sizes import format_size
from recording import Meter, Module, Rowed, Samples, trainer

OOM = torch.OutOfMemoryError("CUDA out of memory")


class Deep(Module):
    def __init__(self, meter: Meter | None = None, *, at: int = 6, error: BaseException = OOM) -> None:
        super().__init__(meter=meter)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(6))
        self.at, self.error = at, error

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer(x)

    def on_after_backward(self) -> None:
        if self.global_step == self.at:
            assert self.meter is not None
            self.meter.use(15 * GIB)
            raise self.error

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def run(module: Module, *callbacks: Callback, size: int = 8) -> None:
    meter = module.meter = Meter()
    loader = DataLoader(Samples(12 * size), batch_size=size, collate_fn=torch.stack)
    with use_reader(meter):
        trainer(list(callbacks), Rowed()).fit(module, loader)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_plain_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Five rows, what held memory, the blocks, three changes with their peaks; and the run's own error."""
    with pytest.raises(torch.OutOfMemoryError):
        run(Deep(), StepMonitor())
    report = capsys.readouterr().err
    assert "The last steps before memory ran out, in GiB" in report
    rows = [line.split() for line in report.splitlines() if "8.000" in line]
    assert [row[1] for row in rows] == ["1", "2", "3", "4", "5"]
    assert "15 GiB, of 16 GiB" in report
    parameters = list(Deep().parameters())
    state = sum(2 * parameter.nbytes + 4 for parameter in parameters)  # two averages, and a count of steps
    assert re.search(rf"optimizer state +│ +{re.escape(format_size(state))} ", report)
    assert "None is checkpointed" in report
    advised = re.findall(r"│ (\d) │ (\S+)", report.split("What would help")[1])
    assert [place for place, _ in advised] == ["1", "2", "3"]
    assert 'ActivationCheckpointing("full")' in dict(advised).values()


def test_a_checkpointed_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks come with what they let go, and to checkpoint them is not advised."""
    module = Deep()
    with pytest.raises(torch.OutOfMemoryError):
        run(module, ActivationCheckpointing(blocks="blocks.*"))
    report = capsys.readouterr().err
    assert "│ blocks.0       │ Sequential │" in report
    assert "2 KiB" in report  # of each block: 8 samples of 64 numbers behind `tanh`
    smaller = re.search(r"a batch of (\d) instead of 8, with accumulate_grad_batches=(\d)", report)
    assert smaller is not None
    assert int(smaller[1]) * int(smaller[2]) == 8
    assert "ActivationCheckpointing(" not in report.split("What would help")[1]
    assert "forward" not in vars(module.blocks[0])


def test_a_run_that_fails_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """In the first step there are no rows, and there is advice."""
    with pytest.raises(torch.OutOfMemoryError):
        run(Deep(at=0), StepMonitor())
    report = capsys.readouterr().err
    assert "The last steps" not in report
    assert "What would help" in report


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyboardInterrupt()])
def test_other_errors_are_left_alone(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    """No report where memory is not what ended the run."""
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        run(Deep(error=error), StepMonitor())
    assert "What would help" not in capsys.readouterr().err


def test_a_step_that_can_not_be_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of the report stands, the reason is said, and what helps in general; the error is the run's."""

    class Looks(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return super().training_step(batch, batch_idx) if batch.sum().item() >= 0 else None

    with pytest.raises(torch.OutOfMemoryError):
        run(Looks(), StepMonitor())
    report = " ".join(capsys.readouterr().err.split())
    assert "What would help can't be estimated: " in report
    assert "What helps beside checkpointing: a smaller micro-batch" in report


class Single(Module):
    """A model in which no block repeats."""

    def on_after_backward(self) -> None:
        raise OOM


class AfterItsStep(Deep):
    """Runs out of memory where it works on no batch."""

    def on_after_backward(self) -> None:
        """All is well."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise OOM


@pytest.mark.parametrize(
    ("module", "there", "not_there"),
    [
        (Single, ["Held by", "What would help"], ["Largest blocks"]),
        (
            AfterItsStep,
            ["Largest blocks", "What would help can't be estimated: the batch is not known"],
            ["What would help; the step"],
        ),
    ],
)
def test_a_report_has_what_is_known(
    module: type[Module], there: list[str], not_there: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No table of blocks where there are none, no estimate where there was no batch; the rest is told."""
    with pytest.raises(torch.OutOfMemoryError):
        run(module(), StepMonitor())
    report = " ".join(capsys.readouterr().err.split())
    assert all(words in report for words in there)
    assert not any(words in report for words in not_there)


@pytest.mark.parametrize(("ranks", "said"), [(1, ""), (2, "Rank 0 ran out of memory:")])
def test_of_several_ranks_the_one_is_named(ranks: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each that fails prints a report of its own."""
    report = OutOfMemoryReport(Failure([], None, None, None, None, {}), {}, [], None, "nobody has tried")
    tell(report, Trainer(accelerator="cpu", devices=ranks, logger=False, enable_checkpointing=False))
    printed = capsys.readouterr().err
    assert said in printed
    assert ("Rank" in printed) == bool(said)
    assert "What would help can't be estimated: nobody has tried" in printed


def test_a_report_that_fails_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The error is the run's own, also where its memory can no longer be read."""

    class Gone(Meter):
        def peak(self) -> int:
            if module.failed:
                raise RuntimeError("the device is gone")
            return super().peak()

    class Fails(Deep):
        failed = False

        def on_after_backward(self) -> None:
            self.failed = self.global_step == 2
            if self.failed:
                raise OOM

    module = Fails()
    loader = DataLoader(Samples(24), batch_size=2, collate_fn=torch.stack)
    with use_reader(Gone()), caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
        trainer([StepMonitor()], Rowed()).fit(module, loader)
    assert "no report of what held memory can be made: the device is gone" in caplog.text


def test_a_snapshot_is_left_out_without_cuda(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Asked for where no allocator has a history: it is said, and the run goes on."""
    with caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
        run(Deep(), StepMonitor(memory_snapshot=str(tmp_path / "oom.pickle")))
    assert "is left out: only CUDA's allocator has a history" in caplog.text
    assert list(tmp_path.iterdir()) == []


class History:
    """Stands for CUDA's history."""

    def __init__(self) -> None:
        self.recording = True
        made.append(self)

    def save(self, path: Path) -> None:
        path.write_text("events" if self.recording else "nothing")

    def stop(self) -> None:
        self.recording = False


made: list[History] = []


def on_cuda(ranks: int) -> Any:
    """As much of a trainer as a snapshot asks: the last of so many ranks, on a CUDA device."""
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    return SimpleNamespace(world_size=ranks, global_rank=ranks - 1, strategy=strategy)


@pytest.mark.parametrize(("ranks", "name"), [(1, "oom.pickle"), (2, "oom-rank1.pickle")])
def test_a_snapshot_lies_where_it_was_asked_for(
    ranks: int, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank writes a file of its own, in a folder that need not be there, and stops recording at the end."""
    monkeypatch.setattr(_memory_snapshot, "CudaAllocationHistory", History)
    snapshot = _memory_snapshot.MemorySnapshot(str(tmp_path / "new/oom.pickle"), on_cuda(ranks))
    snapshot.save()
    snapshot.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]
    assert (tmp_path / "new" / name).read_text() == "events"
    assert not made[-1].recording


def test_a_snapshot_that_can_not_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file lies where its folder should be: a warning, and not another error in place of the run's."""
    monkeypatch.setattr(_memory_snapshot, "CudaAllocationHistory", History)
    (tmp_path / "taken").touch()
    snapshot = _memory_snapshot.MemorySnapshot(str(tmp_path / "taken/oom.pickle"), on_cuda(1))
    with pytest.warns(UserWarning, match="StepMonitor: the memory snapshot can't be written: .*taken"):
        snapshot.save()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_device(tmp_path: Path) -> None:
    """A real out-of-memory error leaves a file that PyTorch's visualiser can read, and a report."""

    class Huge(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            torch.empty(2**50, device=self.device)
            return super().training_step(batch, batch_idx)

    path = tmp_path / "oom.pickle"
    running = trainer([StepMonitor(memory_snapshot=str(path))], Rowed(), accelerator="cuda", devices=1)
    with pytest.raises(torch.OutOfMemoryError):
        running.fit(Huge(), DataLoader(Samples(8), batch_size=2, collate_fn=torch.stack))
    assert path.stat().st_size > 0
