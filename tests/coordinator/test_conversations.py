"""Warm prefixes over two replicas: conversations stay where they were computed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.replicas import NUM_CONVERSATIONS, NUM_TURNS, prompt_tokens_computed

from perdure import LLM
from perdure.coordinator.router import Routing
from tests.coordinator.conftest import MakeFleet
from tests.witness import witness

MOST_RATIO = 1.05


def test_conversations_compute_hardly_more_of_their_prompts_than_with_one_engine(
    make_fleet: MakeFleet, tiny: Path
) -> None:
    """8 conversations of 10 turns, as users have them: a thought between two turns."""
    fleet = make_fleet(routing=Routing("longest_prefix", silence_s=60.0))
    with LLM(str(tiny), page_size=16, num_pages=256) as llm:
        one = prompt_tokens_computed(llm, num_new=14, num_answered=9)
    two = prompt_tokens_computed(fleet.client(), num_new=14, num_answered=9)
    asked = NUM_CONVERSATIONS * sum(14 + turn * (14 + 9) for turn in range(NUM_TURNS))
    assert one < asked / 3, "one engine caches nothing: this proves nothing"
    assert two <= MOST_RATIO * one
    witness("warm-prefixes", asked=asked, one_engine=one, two_replicas=two)
