"""The threaded runner: order, failures of a step, closing."""

from __future__ import annotations

import threading

import pytest

from perdure.api.plan import StepOutput
from perdure.runner.worker import ThreadedRunner
from tests.runner.plans import Driver, Row, prompt


def test_launched_steps_run_in_order_without_waiting(model):
    plain, driver = Driver(model), Driver(model)
    for one in (plain, driver):
        one.admit(0, 9, temperature=0.9)
        one.admit(1, 4)
    expected = [plain.run(Row(0, prompt(9)), Row(1, prompt(4)))]
    expected += [plain.run(Row(0), Row(1)) for _ in range(5)]

    threaded = ThreadedRunner(driver.runner)
    tickets = [threaded.launch(driver.plan(Row(0, prompt(9)), Row(1, prompt(4))))]
    tickets += [threaded.launch(driver.plan(Row(0), Row(1))) for _ in range(5)]
    assert [ticket.wait() for ticket in tickets] == expected
    assert tickets[0].wait() == expected[0]  # again
    threaded.close()


def test_a_step_that_raises_fails_its_rows_until_their_slots_are_given_anew(model):
    driver = Driver(model)
    threaded = ThreadedRunner(driver.runner)
    driver.admit(0, 3)
    bad = driver.plan(Row(0, [1, 2, 10**6]), Row(0, [1]))  # no such id
    output = threaded.launch(bad).wait()
    assert [row for row, _ in output.errors] == [0, 1]
    assert output.errors[0][1].kind == "StepFailed" and "Error: " in output.errors[0][1].message
    assert output.step == bad.step and output.num_sampled == [0, 0] and output.tokens == []
    driver.admit(0, 3)
    good = threaded.launch(driver.plan(Row(0, [1, 2, 3]))).wait()
    assert good.errors == [] and good.num_sampled == [1]
    threaded.close()


def test_steps_launched_behind_one_that_raised_leave_its_rows_out_and_write_nothing_of_them(model):
    plain, driver = Driver(model), Driver(model)
    for one in (plain, driver):
        one.admit(0, 5)
        one.admit(1, 4)
        one.admit(2, 4)
    plain.run(Row(1, prompt(4)))
    expected = [plain.run(Row(1), Row(2, prompt(4))), plain.run(Row(1), Row(2))]

    threaded = ThreadedRunner(driver.runner)
    plans = [
        driver.plan(Row(1, prompt(4))),
        driver.plan(Row(0, [1, 2, 10**6, 3, 4])),
        driver.plan(Row(0), Row(1), Row(2, prompt(4))),
        driver.plan(Row(1), Row(0), Row(2)),
    ]
    tickets = [threaded.launch(plan) for plan in plans]
    for ticket in tickets[:2]:
        ticket.wait()
    kv = driver.runner._kv._pool.clone()
    before, after = tickets[2].wait(), tickets[3].wait()
    assert [row for row, _ in before.errors] == [0] and before.num_sampled == [0, 1, 1]
    assert [row for row, _ in after.errors] == [1] and after.num_sampled == [1, 0, 1]
    assert [before.tokens, after.tokens] == [step.tokens for step in expected]
    own = [page for slot in (0,) for page in driver.runner._rows.block_table[slot].tolist() if page]
    assert own and (kv[:, :, :, own] == driver.runner._kv._pool[:, :, :, own]).all()
    threaded.close()


def test_what_is_no_exception_ends_the_thread_and_every_ticket_says_so(model):
    driver = Driver(model)
    threaded = ThreadedRunner(driver.runner)
    driver.admit(0, 3)
    driver.runner.execute = raise_exit
    tickets = [threaded.launch(driver.plan(Row(0, [1, 2, 3]))) for _ in range(2)]
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="SystemExit"):
            ticket.wait()
    threaded.close()


def raise_exit(plan):
    raise SystemExit(3)


class SlowRunner:
    """Waits for a signal in each step."""

    def __init__(self):
        self.go = threading.Event()

    def execute(self, plan):
        self.go.wait()
        return StepOutput.empty(plan.step)


def test_launch_returns_before_the_step_has_run_and_close_finishes_it(model):
    slow = SlowRunner()
    threaded = ThreadedRunner(slow)
    ticket = threaded.launch(Driver(model).plan())
    slow.go.set()
    threaded.close()
    threaded.close()
    assert ticket.wait().step == 1
    with pytest.raises(AssertionError, match="after close"):
        threaded.launch(Driver(model).plan())
