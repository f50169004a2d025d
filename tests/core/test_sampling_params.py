"""Settings are checked where they are built, frozen, and never the caller's own lists."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from perdure.api.config import EngineConfig
from perdure.api.errors import InvalidValue, shown
from perdure.api.sampling import SamplingParams

WRONG: list[dict[str, Any]] = [
    {"n": 0},
    {"n": -1},
    {"n": True},
    {"n": "2"},
    {"n": 2.0},
    {"n": None},
    {"n": 2**14 + 1},
    {"n": 2, "max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "5"},
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"min_tokens": -1},
    {"min_tokens": 6, "max_tokens": 5},
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": "hot"},
    {"top_k": -2},
    {"top_k": 1.0},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_p": -0.1},
    {"top_p": float("nan")},
    {"min_p": 1.1},
    {"seed": -1},
    {"seed": 2**64},
    {"seed": True},
    {"stop": [""]},
    {"stop": [1]},
    {"stop_token_ids": ["a"]},
    {"stop_token_sequences": [[]]},
    {"logprobs": -2},
    {"prompt_logprobs": 1.0},
    {"logprobs_mode": "cooked"},
    {"output_kind": "all"},
    {"stream_interval": 0},
    {"ignore_eos": 1},
    {"stop": ["x"], "detokenize": False},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": float("nan")},
    {"repetition_penalty": 1e-40},
    {"repetition_penalty": 1e39},
    *[{name: 10**5000} for name in ("n", "max_tokens", "seed", "top_k", "temperature", "logprobs", "priority")],
    *[{name: [10**5000]} for name in ("stop", "stop_token_ids", "bad_words", "logits_processors")],
    {"logit_bias": {5: 10**5000}},
    {"logit_bias": ""},
    {"stop": {"a": 1}},
    {"bad_words": {"a": 1}},
    *[{name: given} for name in ("stop_token_ids", "allowed_token_ids", "forced_token_ids") for given in (b"x", "")],
    {"stop_token_sequences": ""},
    {"stop_token_sequences": [b"x"]},
    {"presence_penalty": 2.1},
    {"presence_penalty": "0.5"},
    {"frequency_penalty": -2.1},
    {"frequency_penalty": True},
    {"logit_bias": [7]},
    {"logit_bias": {"x": 1.0}},
    {"logit_bias": {"-7": 1.0}},
    {"logit_bias": {1.5: 1.0}},
    {"logit_bias": {7: 1.0, "7": 2.0}},
    {"logit_bias": {7: float("-inf")}},
    {"logit_bias": {7: 1e38}},
    {"logit_bias": {7: None}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": ["7"]},
    {"allowed_token_ids": 7},
    {"bad_words": "word"},
    {"bad_words": [7]},
    {"bad_words": [[]]},
    {"bad_words": [""]},
    {"bad_words": [["a"]]},
    {"logits_processors": [7]},
    {"logits_processors": ["module"]},
    {"logits_processors": ["module:"]},
    {"logprob_token_ids": ["a"]},
    {"forced_token_ids": [True]},
    {"forced_token_ids": [1, 2, 3], "max_tokens": 2},
    {"forced_token_ids": [5], "min_tokens": 9},
    {"forced_token_ids": [], "n": 2},
    {"forced_token_ids": {9, 5}},
    {"stop_token_sequences": [{9, 5}]},
    {"logit_bias": [(1, 2), (1, 3)]},
    {"logit_bias": [(1, 2, 3)]},
    *[{name: np.array(given)} for name in ("top_k", "stop_token_ids") for given in (True, 1.5, [[1]], ["1"])],
    *[{name: torch.tensor([1])} for name in ("stop_token_sequences", "bad_words")],
    {"temperature": np.bool_(True)},
    {"temperature": np.float32("nan")},
    {"temperature": Fraction(10**400)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=shown)
def test_T22_a_wrong_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(**wrong)
    assert any(name in str(caught.value) for name in wrong)
    assert isinstance(caught.value, ValueError)


def test_what_a_list_holds_is_told_as_it_is() -> None:
    for wrong, words in (
        ({"bad_words": [None]}, "bad_words holds None, which is not a list of token ids"),
        ({"stop_token_sequences": [None]}, "stop_token_sequences holds None, which is not a list of token ids"),
        ({"stop_token_sequences": torch.tensor([1])}, "stop_token_sequences holds 1, which is not a list of token ids"),
        ({"allowed_token_ids": [2**63]}, f"holds {2**63}, which is not a token id: ids are 0 to vocab_size - 1"),
        ({"logit_bias": {"-1": 1}}, "holds '-1', which is not a token id: ids are 0 to vocab_size - 1"),
        ({"forced_token_ids": {9}}, "forced_token_ids={9} is a set, which has no order"),
        ({"forced_token_ids": [5], "min_tokens": 9}, "min_tokens=9 is more than the 1 ids of forced_token_ids"),
        ({"forced_token_ids": [], "n": 2}, "n=2 asks for several outputs, and the 0 ids of forced_token_ids"),
    ):
        with pytest.raises(InvalidValue) as caught:
            SamplingParams(**wrong)
        assert words in str(caught.value)


def test_numbers_and_arrays_of_numpy_and_torch_are_kept_as_plain_ones() -> None:
    given = SamplingParams(
        n=np.int64(2),
        max_tokens=np.uint8(9),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        seed=np.uint64(2**64 - 1),
        stop=np.array(["a"]),
        stop_token_ids=np.array([1, 2]),
        stop_token_sequences=torch.tensor([[1, 2], [3, 4]]),
        bad_words=[torch.tensor([5]), "word"],
        logit_bias={np.int32(7): np.float16(1.5)},
        allowed_token_ids={5},
        logprob_token_ids=[np.int64(3)],
    )
    plain = SamplingParams(
        n=2,
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        seed=2**64 - 1,
        stop=("a",),
        stop_token_ids=(1, 2),
        stop_token_sequences=((1, 2), (3, 4)),
        bad_words=((5,), "word"),
        logit_bias=((7, 1.5),),
        allowed_token_ids=(5,),
        logprob_token_ids=(3,),
    )
    assert given == plain and repr(given) == repr(plain)
    assert msgspec.msgpack.encode(given) == msgspec.msgpack.encode(plain)


def test_T50_top_p_says_what_to_use_instead() -> None:
    with pytest.raises(InvalidValue, match=r"1 turns the filter off, temperature=0 is greedy"):
        SamplingParams(top_p=0)


def test_T23_objects_are_frozen_and_the_callers_lists_are_not_kept() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops, stop_token_ids=[1], stop_token_sequences=[[1, 2]])
    stops.append("b")
    assert params.stop == ("a",) and params.stop_token_sequences == ((1, 2),)
    with pytest.raises(AttributeError):
        params.max_tokens = 3  # type: ignore[misc]


def test_T52_keys_of_a_bias_may_be_strings_of_digits_and_the_callers_dictionary_is_left_alone() -> None:
    given = {"7": 100, 3: -1.5}
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((3, -1.5), (7, 100.0)) and given == {"7": 100, 3: -1.5}
    assert SamplingParams(logit_bias={}).logit_bias == () and SamplingParams().logit_bias is None


def test_T23_lists_of_ids_and_words_are_copied() -> None:
    ids, words = [5, 6], [[1, 2], "word"]
    params = SamplingParams(allowed_token_ids=ids, logprob_token_ids=ids, forced_token_ids=ids, bad_words=words)
    ids.append(7)
    words.append([3])
    assert params.allowed_token_ids == params.logprob_token_ids == params.forced_token_ids == (5, 6)
    assert params.bad_words == ((1, 2), "word")


def test_T48_zero_and_unset_temperature_are_told_apart() -> None:
    assert SamplingParams().temperature == 1.0
    assert SamplingParams(temperature=0).temperature == SamplingParams(temperature=0.0).temperature == 0


def test_a_single_stop_string_is_a_list_of_one_and_huge_values_are_fine() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(max_tokens=2**31, top_k=10**7, seed=2**64 - 1).top_k == 10**7


def test_settings_survive_the_wire() -> None:
    params = SamplingParams(
        max_tokens=3,
        temperature=0,
        stop=["x"],
        stop_token_sequences=[[1, 2]],
        logprobs=-1,
        logit_bias={"5": 1},
        bad_words=[[1, 2], "word"],
        allowed_token_ids=[4],
        logits_processors=["module:function"],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 0}, "page_size=0 is out of range: 1 to 256"),
        ({"steps_in_flight": 5}, "steps_in_flight=5 is out of range: 1 to 4"),
        ({"num_pages": 4, "kv_cache_bytes": 10}, "give only one"),
        ({"dtype": "int4"}, "none of auto, float32"),
        ({"quantization": "int8"}, "quantization='int8' is none of gguf, fp8"),
        ({"quantization": ["gguf"]}, r"quantization=\['gguf'\] is none of gguf, fp8"),
        ({"quantization": "gguf", "dtype": "float16"}, "dtype='float16' does not go with quantization='gguf'"),
        ({"quantization": "gguf", "load_format": "dummy"}, "load_format='dummy' does not go with"),
        ({"quantization": "gguf", "linear_backend": "packed"}, "linear_backend='packed' .* it needs auto or native"),
        ({"device": "tpu"}, "device='tpu' is none of auto, cpu, cuda"),
        (
            {"device": "cuda", "batch_invariant": True, "linear_backend": "plain"},
            "linear_backend='plain' is not batch invariant on device='cuda': it needs batch_invariant=False",
        ),
        (
            {"device": "cuda", "batch_invariant": True, "attention_backend": "reference"},
            "attention_backend='reference' is not batch invariant on device='cuda'",
        ),
        ({"device": "cuda", "attention_backend": "tiled"}, "attention_backend='tiled' is not for device='cuda'"),
        ({"device": "cuda", "linear_backend": "packed"}, "linear_backend='packed' is not for device='cuda'"),
        (
            {"device": "cpu", "attention_backend": "hopper"},
            "attention_backend='hopper' is not for device='cpu', which takes auto, native, tiled, plain, reference",
        ),
        (
            {"device": "cpu", "linear_backend": "triton"},
            "linear_backend='triton' is not for device='cpu', which takes auto, native, packed, invariant, plain, ref",
        ),
        (
            {"device": "cpu", "sampling_backend": "flashinfer"},
            "sampling_backend='flashinfer' is not for device='cpu', which takes auto, torch$",
        ),
        ({"device": "cpu", "kv_memory": "managed"}, "kv_memory='managed' is not for device='cpu', which takes device$"),
        (
            {"device": "cpu", "linear_backend": "plain"},
            "linear_backend='plain' is not batch invariant on device='cpu': it needs batch_invariant=False",
        ),
        ({"batch_invariant": True, "attention_backend": "plain"}, "'plain' is not batch invariant: it needs"),
        ({"sampling_backend": "numpy"}, "sampling_backend='numpy' is none of auto, torch, flashinfer"),
        ({"device": "cuda", "quantization": "gguf"}, "quantization='gguf' is not for device='cuda'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 is no part: above 0, up to 1"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True is no part"),
        ({"num_cuda_graphs": -2}, "num_cuda_graphs=-2 is out of range: -1 to 4096"),
        ({"cuda_graph_max_tokens": 2**63}, "cuda_graph_max_tokens=.* is out of range: 1 to 1048576"),
        ({"cuda_graph_mixed_prefill": 2**62}, "cuda_graph_mixed_prefill=.* is out of range: 0 to 65536"),
        ({"kv_memory": "host"}, "kv_memory='host' is none of device, managed"),
        ({"cuda_graph_sizing": "cubic"}, "cuda_graph_sizing='cubic' is none of exponential, linear, hybrid"),
        ({"cuda_graph_all_prefills": 1}, "cuda_graph_all_prefills=1 is not a bool"),
        ({"batch_invariant": "yes"}, "batch_invariant='yes' is not a bool"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 is out of range: at least 1"),
        ({"num_pages": 2**63}, r"num_pages=9223372036854775808 is out of range: at least 1, below 2\*\*63"),
        ({"max_num_seqs": True}, "not an integer"),
        ({"pagesize": 4}, "unknown setting 'pagesize'"),
        ({"block_size": 4, "page_size": 8}, "they differ"),
    ],
)
def test_configuration_is_checked_where_it_is_built(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        EngineConfig.of(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"linear_backend": "plain"},
        {"attention_backend": "hopper"},
        {"attention_backend": "native", "kv_memory": "managed"},
        {"sampling_backend": "flashinfer"},
    ],
    ids=str,
)
def test_what_one_device_takes_is_not_refused_before_the_device_is_known(settings: dict[str, Any]) -> None:
    assert EngineConfig.of(device="auto", **settings).device == "auto"


def test_block_size_is_page_size() -> None:
    assert EngineConfig.of(block_size=4).page_size == 4
