"""Whether drafting pays is seen by the clock; here the clock is made up."""

from dataclasses import dataclass, field

import pytest

from bulk_pipeline.engine.draft_clock import KNOWN, DraftClock

PLAIN = 1.0  # seconds of a plain step


@dataclass
class Run:
    """Steps of some rows that look for drafts wherever they may, or in some such steps only."""

    now: float = 0.0
    clock: DraftClock = field(init=False)
    num_looked: int = 0
    plain_seconds: float = 0.0  # in which plain steps would have made the same tokens

    def __post_init__(self) -> None:
        self.clock = DraftClock(lambda: self.now)

    def steps(
        self, number: int, looking: float, tokens: float, num_rows: int = 4, every: int = 1
    ) -> None:
        """Run steps: a looking one takes so long, and makes so many tokens a row."""
        for place in range(number):
            looks = self.clock.may_look(num_rows) and place % every == 0
            self.now += looking if looks else PLAIN
            made = tokens if looks else 1.0
            self.num_looked += looks
            self.plain_seconds += made * PLAIN
            self.clock.took(num_rows, round(made * num_rows), looks)

    @property
    def speed(self) -> float:
        """How many times as fast as plain steps alone."""
        return self.plain_seconds / self.now


@pytest.mark.parametrize(("looking", "tokens"), [(1.1, 1.0), (1.65, 1.25), (3.0, 1.0), (3.0, 2.75)])
def test_little_is_lost_where_drafts_do_not_pay(looking, tokens):
    run = Run()
    run.steps(4000, looking, tokens)
    assert run.num_looked > 0
    assert run.speed > 0.96


@pytest.mark.parametrize("every", [2, 3, 5])
def test_little_is_lost_where_rows_look_now_and_then(every):
    """They pause on their own where they find little."""
    run = Run()
    run.steps(4000, 2.0, 1.25, every=every)
    assert run.num_looked > 0
    assert run.speed > 0.96


@pytest.mark.parametrize(("looking", "tokens"), [(1.3, 1.75), (1.9, 3.0), (1.05, 1.25)])
def test_nearly_all_is_won_where_they_pay(looking, tokens):
    run = Run()
    run.steps(4000, looking, tokens)
    assert run.speed > 0.97 * tokens / looking


def test_a_change_is_noticed():
    run = Run()
    run.steps(2000, 1.5, 1.0)
    before = run.num_looked
    run.steps(2000, 1.5, 3.0)
    assert run.num_looked - before > 1500
    before, then = run.num_looked, run.now
    run.steps(1000, 1.5, 1.0)
    assert run.num_looked - before < 150
    assert run.now - then < 1000 * 1.06


def test_plain_steps_of_about_so_many_rows_come_first():
    run = Run()
    run.steps(2 * KNOWN, 1.2, 2.0, num_rows=4)
    assert run.clock.may_look(4)
    assert run.clock.may_look(7)
    assert not run.clock.may_look(8)
    assert not run.clock.may_look(1)


def test_rows_that_end_while_others_look_spoil_no_measurement():
    """Where they leave fewer rows than plain steps were ever timed with."""
    run = Run()
    run.steps(100, 1.3, 2.0, num_rows=4)
    assert run.clock.may_look(4)
    for _ in range(4):
        run.now += PLAIN
        run.clock.took(3, 3, True)
    run.steps(1000, 1.3, 2.0, num_rows=4)
    assert run.num_looked > 900


def test_the_time_of_prompts_is_left_out():
    """Prompts are read before every fourth step, and take long."""
    run = Run()
    for _ in range(800):
        run.now += 10.0
        run.clock.skip()
        run.steps(4, 1.3, 2.0)
    assert run.num_looked > 0.9 * 3200


def test_a_single_slow_step_counts_for_little():
    """As the first step of its size, which is compiled."""
    run = Run()
    for _ in range(30):
        run.steps(100, 1.3, 2.0)
        run.now += 50.0
    assert run.num_looked > 0.9 * 3000
