"""The reference itself: judging a whole output at once is the same as a full forward for every token."""

from tests.engine.helpers import prompt
from tests.engine.reference import CLEAR_LEAD, Reference


def test_judging_an_output_is_ref(reference: Reference, one_thread: None) -> None:
    for seed in range(3):
        ids = prompt(9, seed)
        found = reference(ids, 40)
        assert min(found.leads) > CLEAR_LEAD and len({*found.token_ids}) > 20
        wrong = [*found.token_ids[:20], (found.token_ids[20] + 1) % 512, *found.token_ids[21:]]
        judged = reference.judge(ids, wrong)
        assert judged.token_ids[:21] == found.token_ids[:21] and judged.token_ids != wrong
