"""Two replicas in processes of their own: pinned prefixes, and weights that a client gives as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from perdure import LLM, InvalidValue, ModelLoadError, StateError
from perdure.coordinator.router import Routing
from perdure.engine import given
from tests.coordinator.conftest import MakeFleet
from tests.coordinator.fleet import QUIET
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness

FAR = QUIET._replace(policy="round_robin")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    from perdure.models.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("other-model"), seed=1)


@pytest.fixture(scope="module")
def direct_other(other: Path) -> Iterator[LLM]:
    with LLM(str(other), page_size=16, num_pages=96, steps_in_flight=1, enable_prefix_caching=False) as llm:
        yield llm


def test_tensors_reach_every_replica_and_those_that_come_later(
    make_fleet: MakeFleet, tiny: Path, other: Path, direct: LLM, direct_other: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces; checked everywhere before anything changes; a replica that is started again gets them from another;
    and where all are lost at once they are given again."""
    monkeypatch.setattr(given, "PIECE_BYTES", 50_000)
    fleet = make_fleet(routing=FAR, num_pages=96)
    client = fleet.client()
    tensors = load_file(other / "model.safetensors")
    num_pieces = -(-sum(tensor.nbytes for tensor in tensors.values()) // 50_000)
    ids, params = prompt(20), settings(max_tokens=8, prompt_logprobs=0)
    (old,), (new,) = (llm.generate([ids], params) for llm in (direct, direct_other))

    def both() -> None:
        """One request to each replica, by turns."""
        for result in client.generate([ids, ids], params):
            check_equal(result, new)

    broken = {**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1]}
    with pytest.raises(ModelLoadError, match=r"replica [01]: .*model.norm.weight.* has shape \[63\], expected \[64\]"):
        client.update_weights(broken)
    with pytest.raises(InvalidValue, match="is no pair of a name and a tensor"):
        client.update_weights([1, 2])  # type: ignore[list-item]
    for result in client.generate([ids, ids], params):
        check_equal(result, old)

    client.update_weights(tensors, epoch=3)
    both()
    assert client.stats().weight_epoch == 3 and not client._engine._given  # type: ignore[attr-defined]

    fleet.kill(0)
    fleet.start(0)
    fleet.wait_until_all_serve()
    both()

    for index in (0, 1):
        fleet.kill(index)
    for index in (0, 1):
        fleet.start(index)
    waiting = fleet.router.members
    fleet.wait_until(lambda: sum(one.lacks_weights for one in waiting.all) == 2, "both wait for weights")
    assert not fleet.num_serving
    client.update_weights(tensors, epoch=4)
    both()
    witness("weights-as-tensors", pieces=num_pieces, epoch=client.stats().weight_epoch)
    client.update_weights(str(tiny))


def test_pinned_prefixes_outlive_pressure_and_go_with_their_client(make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet(routing=Routing("longest_prefix", alpha=0.0, silence_s=60.0), num_pages=40)
    client, other = fleet.client(), fleet.client()
    ids, params = prompt(33), settings(max_tokens=2)
    crowd = [prompt(200, seed=seed) for seed in range(1, 9)]

    with client.pin_prefix(ids) as pin:
        assert pin.num_tokens == 32
        client.generate([ids], params)
        client.generate(crowd, params)
        (again,) = client.generate([ids], params)
        assert again.num_cached_tokens == 32, "the crowd pushed it out"
        check_equal(again, direct.generate([ids], params)[0])
        with pytest.raises(StateError, match="1 are not released"):
            other.reset()
    client.generate(crowd, params)
    (after,) = client.generate([ids], params)
    assert after.num_cached_tokens == 0, "nothing was pushed out: the crowd proves nothing"

    with pytest.raises(InvalidValue, match=r"replica [01]: the prefix has 5 tokens"):
        client.pin_prefix(prompt(5))
    other.pin_prefix(ids)
    assert fleet.router.orders.num_pins == 1
    other.shutdown()
    fleet.wait_until(lambda: not fleet.router.orders.num_pins, "it is released with its client")
    witness("pins-routed", held=pin.num_tokens, cached=again.num_cached_tokens)


def test_a_request_follows_what_a_replica_has_computed_beyond_what_it_was_sent(
    make_fleet: MakeFleet, direct: LLM
) -> None:
    """Pages of the output are told too: a conversation's next turn finds the answer of the turn before."""
    fleet = make_fleet(routing=Routing("longest_prefix", alpha=0.0, silence_s=60.0), num_pages=40)
    client, ids = fleet.client(), prompt(20)
    (first,) = client.generate([ids], settings(max_tokens=60))
    longer = [*ids, *first.outputs[0].token_ids, 7, 8, 9]
    table = fleet.router._chooser.table
    fleet.wait_until(lambda: len(table) >= 4, "its replica has told what it holds")
    (second,) = client.generate([longer], settings(max_tokens=4))
    check_equal(second, direct.generate([longer], settings(max_tokens=4))[0])
    assert second.num_cached_tokens >= 64
    client.reset_prefix_cache()
    fleet.wait_until(lambda: not len(table), "and that it holds nothing any more")
    witness("prefixes-told", cached=second.num_cached_tokens)
