"""What ranks agree on, and that none of them waits for one that has failed, was killed, or does not come."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_ckpt.processes import Alone, Processes, _is_over, is_first_rank, ranks_of
from two_ranks import on_two_ranks


def test_one_process_agrees_with_itself() -> None:
    """It gets back what it gives, and nobody is told of its failure."""
    ranks = ranks_of(1, "test")
    assert isinstance(ranks, Alone)
    assert (ranks.gather("a"), ranks.from_first("a"), ranks.most(3)) == (["a"], "a", 3)
    ranks.failed(ValueError())


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_first_rank_is_told_from_the_others(rank: int | None) -> None:
    """A process without others is the first, too."""
    if rank is not None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        assert is_first_rank() is (rank != 1)
    finally:
        if rank is not None:
            dist.destroy_process_group()


def _begin(rank: int, seconds: float = 60) -> Processes:
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
    return Processes("test")


def _agree(rank: int, folder: Path) -> None:
    ranks = _begin(rank)
    mine = {"rank": rank, "long": "x" * 1000 * rank}
    told = [ranks.gather(mine), ranks.from_first(mine), ranks.most(-5 * rank), ranks.gather(None)]
    told.append([row.tolist() for row in ranks.rows(torch.tensor([rank, 2.5]))])
    # A run that has failed on all ranks alike is over: its notes are none of the next one's.
    ranks.failed(ValueError("of the run before"))
    again = Processes("test")
    time.sleep(2.5 * rank)
    told.append(again.most(rank))
    # The first to fail is told of, whatever follows from it elsewhere.
    if rank == 1:
        again.failed(ValueError("the cause"))
        again.failed(RuntimeError("what came of it"))
    else:
        started = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            again.gather("waits")
        told += [str(caught.value), time.monotonic() - started < 10]
    torch.save(told, folder / f"{rank}.pt")


@pytest.mark.slow
def test_two_ranks_agree_and_hear_of_a_failure(tmp_path: Path) -> None:
    """Values of any size come from each, from the first, or as the largest; a rank that fails says so once for all."""
    on_two_ranks(_agree, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    gathered = [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 1000}]
    assert second == [gathered, gathered[0], 0, [None, None], [[0.0, 2.5], [1.0, 2.5]], 1]
    assert first[:6] == second
    assert first[6:] == [
        "test: rank 1 failed with ValueError: the cause. Rank 0 waits for it no longer; what that process printed says "
        "more",
        True,
    ]


def _does_not_come(rank: int, how: str, folder: Path) -> None:
    ranks = _begin(rank, seconds=3)
    ranks.most(0)
    if rank == 1:
        if how == "killed":
            os._exit(0)
        time.sleep(8)
        return
    with pytest.raises(RuntimeError) as caught:
        ranks.most(1)
    (folder / "said").write_text(str(caught.value))


class _DoneSince:
    """A collective that ends between a wait that was too short and the question whether it has."""

    def __init__(self, error: RuntimeError | None) -> None:
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise self.error

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_wait_is_over() -> None:
    """It was late, and nothing went wrong; what did go wrong is raised as it is."""
    assert _is_over(_DoneSince(None))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Connection closed"):
        _is_over(_DoneSince(RuntimeError("Connection closed")))  # type: ignore[arg-type]


class _EndsLate(_DoneSince):
    """A collective that a first wait is too short for."""

    late = True

    def is_completed(self) -> bool:
        late, self.late = self.late, False
        return not late

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.late:
            raise RuntimeError("Operation timed out!")


def test_a_rank_that_fails_right_after_a_call_has_done_its_part_in_it() -> None:
    """Its note is there before the call is over here: the call ends all the same."""
    one = object.__new__(Processes)
    one._who, one._rank, one._size, one._store, one._calls = "test", 0, 2, dist.HashStore(), 0
    one._store.set("failed", "rank 1 failed with ValueError: afterwards")
    one._wait(lambda: _EndsLate(None))


class _NeverEnds(_DoneSince):
    """A collective that a rank which has failed does not come to."""

    def is_completed(self) -> bool:
        return False


def test_a_call_that_a_failed_rank_does_not_come_to_is_given_up() -> None:
    """Its note is there, and the call is not over: nobody waits any longer, and the note is the error."""
    one = object.__new__(Processes)
    one._who, one._rank, one._size, one._store, one._calls = "test", 0, 2, dist.HashStore(), 0
    one._store.set("failed", "rank 1 failed with ValueError: before")
    with pytest.raises(
        RuntimeError, match=r"^test: rank 1 failed with ValueError: before\. Rank 0 waits for it no longer"
    ):
        one._wait(lambda: _NeverEnds(None))


def test_a_failing_first_rank_stays_until_the_others_have_heard() -> None:
    """The store often goes with it; what was heard once is known without the store."""
    store, ranks = dist.HashStore(), []
    for rank in range(3):
        one = object.__new__(Processes)
        one._who, one._rank, one._size, one._store, one._calls = "test", rank, 3, store, 0
        ranks.append(one)
    failing = threading.Thread(target=ranks[0].failed, args=(ValueError("no"),), daemon=True)
    failing.start()
    while ranks[1]._note() is None:
        time.sleep(0.01)
    failing.join(0.3)
    assert failing.is_alive()
    ranks[2].failed(RuntimeError("the first one has failed"))
    failing.join(2)
    assert not failing.is_alive()
    for one in ranks:
        one._store = dist.HashStore()
        assert one._note() == "rank 0 failed with ValueError: no"


def test_of_three_ranks_only_those_that_did_not_come_are_named() -> None:
    """One that is a call ahead is not missing, nor is one that waits in the same call."""
    store = dist.HashStore()
    ranks = []
    for rank, calls in enumerate((6, 5)):
        one = object.__new__(Processes)
        one._who, one._rank, one._size, one._store, one._calls = "test", rank, 3, store, calls
        ranks.append(one)
        one._say_how_far()
    assert ranks[1]._missing() == "rank 2"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "slow"])
def test_a_rank_that_does_not_come_is_named(how: str, tmp_path: Path) -> None:
    """It left no note: its connections broke, or the process group's timeout has passed."""
    on_two_ranks(_does_not_come, how, tmp_path)
    said = (tmp_path / "said").read_text()
    assert said.startswith("test: rank 0 waited in vain for rank 1 (")
    assert said.endswith("if it is only slow, give the strategy a longer timeout")
