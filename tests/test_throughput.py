"""Rates are exact for given times; warm-up, validation and saving don't count."""

import pytest

from lightning_ckpt.throughput import Step, Stopwatch, Work, ideal_seconds, throughput


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def seconds(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


class TestThroughput:
    def test_one_step(self) -> None:
        """Half a second for 8 samples and 4096 tokens, with a tenth of waiting."""
        work = Work(model_flops=3e12, model_seconds=0.2, total_seconds=0.25)
        step = Step(seconds=0.5, wait_seconds=0.1, samples=8, tokens=4096, work=work)
        assert throughput([step]) == {
            "step_time_ms": 500.0,
            "data_wait_ms": 100.0,
            "samples_per_sec": 16.0,
            "tokens_per_sec": 8192.0,
            "batches_per_sec": 2.0,
            "tflops_per_sec": 6.0,
            "mfu": 0.4,
            "hfu": 0.5,
        }

    def test_the_typical_step_of_an_interval(self) -> None:
        """One hiccup among steps leaves the interval's figures as they are."""
        steps = [Step(seconds=time, wait_seconds=0.0, samples=10) for time in (1.0, 30.0, 1.0)]
        assert throughput(steps) == {
            "step_time_ms": 1000.0,
            "data_wait_ms": 0.0,
            "samples_per_sec": 10.0,
            "batches_per_sec": 1.0,
        }

    def test_warmup_is_left_out(self) -> None:
        """Setting-up steps don't count beside steady ones."""
        steps = [Step(9.0, 0.0, warmup=True), Step(9.0, 0.0, warmup=True), Step(1.0, 0.0)]
        assert throughput(steps)["step_time_ms"] == 1000.0

    def test_warmup_is_better_than_nothing(self) -> None:
        """The very first row has figures."""
        assert throughput([Step(9.0, 0.0, samples=18, warmup=True)])["samples_per_sec"] == 2.0

    def test_unknown_is_left_out(self) -> None:
        """What one step of the interval does not know is not guessed from the others."""
        steps = [Step(1.0, 0.0, samples=1, tokens=5), Step(1.0, 0.0, samples=1), Step(1.0, 0.0, samples=1)]
        assert set(throughput(steps)) == {"step_time_ms", "data_wait_ms", "samples_per_sec", "batches_per_sec"}

    def test_no_time_no_rate(self) -> None:
        """A clock too coarse to see the step gives no infinite rate."""
        assert set(throughput([Step(0.0, 0.0, samples=8)])) == {"step_time_ms", "data_wait_ms"}

    def test_an_empty_interval(self) -> None:
        """No step, no figures."""
        assert throughput([]) == {}


class TestWork:
    def test_more_data_is_more_work(self) -> None:
        """FLOPs and ideal times scale together; what is unknown stays so."""
        assert Work(2.0, 1.0, None).times(3) == Work(6.0, 3.0, None)
        assert Work(2.0).times(0.5) == Work(1.0)

    def test_each_format_at_its_own_peak(self) -> None:
        """100 at 100/s and 30 at 10/s take four seconds."""
        assert ideal_seconds({"bf16": 100, "fp32": 30}, {"bf16": 100, "fp32": 10, "tf32": 1}) == 4.0

    def test_an_unknown_peak_spoils_the_sum(self) -> None:
        """A part that can't be timed leaves the whole unknown, unless it is empty."""
        assert ideal_seconds({"bf16": 1, "fp64": 1}, {"bf16": 1}) is None
        assert ideal_seconds({"bf16": 1, "fp64": 0}, {"bf16": 1}) == 1.0


class TestStopwatch:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def test_laps_are_gapless(self, clock: Clock) -> None:
        """What one lap leaves, the next one has."""
        watch = Stopwatch(clock)
        watch.restart()
        clock.sleep(2)
        assert seconds(watch.lap()) == 2
        clock.sleep(3)
        assert seconds(watch.lap()) == 3

    def test_held_time_does_not_count(self, clock: Clock) -> None:
        """Two seconds of validation within five leave three."""
        watch = Stopwatch(clock)
        watch.restart()
        clock.sleep(1)
        watch.hold("validation")
        clock.sleep(2)
        watch.release("validation")
        clock.sleep(2)
        assert seconds(watch.lap()) == 3

    def test_reasons_overlap(self, clock: Clock) -> None:
        """A checkpoint saved during validation doesn't set the watch going when it is written."""
        watch = Stopwatch(clock)
        watch.restart()
        watch.hold("validation")
        watch.hold("saving")
        watch.release("saving")
        clock.sleep(2)
        watch.release("validation")
        clock.sleep(1)
        assert seconds(watch.lap()) == 1

    def test_a_lap_while_held(self, clock: Clock) -> None:
        """A lap during a pause takes what was counted, and the pause goes on."""
        watch = Stopwatch(clock)
        watch.restart()
        clock.sleep(1)
        watch.hold("saving")
        clock.sleep(1)
        assert seconds(watch.lap()) == 1
        clock.sleep(1)
        watch.release("saving")
        clock.sleep(4)
        assert seconds(watch.lap()) == 4

    def test_releasing_what_does_not_hold(self, clock: Clock) -> None:
        """An end without a beginning changes nothing."""
        watch = Stopwatch(clock)
        watch.restart()
        clock.sleep(1)
        watch.release("validation")
        clock.sleep(1)
        assert seconds(watch.lap()) == 2

    def test_restart_forgets(self, clock: Clock) -> None:
        """After a run that broke off, the next one starts at zero and isn't held."""
        watch = Stopwatch(clock)
        watch.restart()
        clock.sleep(7)
        watch.hold("validation")
        watch.restart()
        clock.sleep(1)
        assert seconds(watch.lap()) == 1

    def test_before_the_start(self, clock: Clock) -> None:
        """A watch nobody started has counted nothing."""
        watch = Stopwatch(clock)
        assert watch.lap() == []
