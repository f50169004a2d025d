"""Families with attention of several kinds on the real paged runner: against dense attention, and against themselves.

- Bitwise: chunks, decode and neighbours give the scores that the whole prompt gave.
- Windows of 40 positions, pages of 4, sequences of 110: pages and whole tiles fall out of the window on the way.
"""

import pytest

from perdure.models.tiny import make_tiny
from perdure.models.weights import load_model
from perdure.ops.sampling_reference import log_softmax
from tests.models.helpers import logits_in_chunks
from tests.runner.plans import Driver, Row, entries, prompt, prompt_scores

CASES = {
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "gemma3, soft caps": (
        "gemma3",
        {"num_hidden_layers": 2, "sliding_window_pattern": 2, "attn_logit_softcapping": 5.0},
    ),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "mistral, off-by-one": ("mistral", {"sliding_window": 5, "softmax_type": "off-by-one"}),
    "qwen2, sinks": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "softmax_type": "learnable",
        },
    ),
}
IDS = prompt(110)


@pytest.fixture(scope="module", params=CASES)
def family(request, tmp_path_factory):
    name, config = CASES[request.param]
    return load_model(make_tiny(name, tmp_path_factory.mktemp("family"), **config)).model


def test_scores_equal_dense_attention(family):
    logits = logits_in_chunks(family, IDS, [len(IDS)]).numpy()
    for position, chosen, _, _ in prompt_scores(family, IDS, len(IDS)):
        assert abs(chosen - log_softmax(logits[position - 1])[IDS[position]]) < 1e-3


def test_chunks_and_neighbours_change_no_bit(family):
    whole = prompt_scores(family, IDS, len(IDS))
    for size in (32, 7):
        assert prompt_scores(family, IDS, size) == whole
    assert prompt_scores(family, IDS, 16, neighbour=True) == whole


def test_decode_changes_no_bit(family):
    """Tokens fed one by one are scored as in the whole prompt: their scores come with the step that draws the next."""
    whole = prompt_scores(family, IDS, len(IDS))
    driver = Driver(family)
    driver.admit(0, 1, num_prompt_logprobs=3)
    driver.admit(1, 30)
    driver.run(Row(1, IDS[:30]))
    found = []
    for position in range(len(IDS) - 1):
        row = Row(0, IDS[position : position + 1], position, False, IDS[position + 1 : position + 2], position + 1)
        rows = [row] if position % 3 else [Row(1), row]
        found += [entry[1:] for entry in entries(driver.run(*rows).prompt_records)]
    assert found == whole


@pytest.mark.parametrize("backend", ["reference", "plain"])
def test_other_forms_draw_the_same(tmp_path, backend):
    model = load_model(make_tiny("mistral", tmp_path)).model
    drawn = []
    for form in ("tiled", backend):
        driver = Driver(model, batch_invariant=form != "plain", attention_backend=form)
        driver.admit(0, len(IDS) - 20)
        drawn.append(driver.run(Row(0, IDS[:-20])).tokens + driver.decode([0], 15)[0])
    assert drawn[0] == drawn[1]


def test_a_form_that_lacks_what_a_model_needs_is_refused(tmp_path):
    model = load_model(make_tiny("gemma3", tmp_path, attn_logit_softcapping=5.0)).model
    with pytest.raises(ValueError, match=r"'plain' has no soft cap \(softcap=5.0\); use 'tiled'"):
        Driver(model, batch_invariant=False, attention_backend="plain")


def test_layers_of_a_kind_share_one_plan(tmp_path):
    runner = Driver(load_model(make_tiny("gemma3", tmp_path)).model).runner
    assert [kind.window for kind in runner._forms] == [40, None]
