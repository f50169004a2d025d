"""Weights as TRL's clients of a vLLM server send them: the calls of trl 1.16 and of the server that TRL had before,
over a stand-in for vLLM's communicator; and by these clients themselves where they are installed."""

from __future__ import annotations

import importlib
import socket
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from perdure import LLM, SamplingParams
from perdure.models.tiny import make_tiny_llama
from tests.server import vllm_stand_in as vllm
from tests.server.conftest import Running, running
from tests.server.started import PATH

SETTINGS: dict[str, Any] = {"seed": 3, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The same model with other weights."""
    directory = make_tiny_llama(tmp_path_factory.mktemp("other"), seed=1, max_position_embeddings=1024)
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def expected(tiny: Path, other: dict[str, Tensor]) -> tuple[str, str]:
    """What the model says, and the other one."""
    with LLM(str(tiny)) as llm:
        [before] = llm.generate(["abc"], SamplingParams(**SETTINGS))
        llm.update_weights(other)
        [after] = llm.generate(["abc"], SamplingParams(**SETTINGS))
    return before.outputs[0].text, after.outputs[0].text


@pytest.fixture(scope="module")
def own(tiny: Path) -> Iterator[Running]:
    with running(tiny, {"served_model_name": "tiny"}, num_pages=64, check_integrity=True) as server:
        yield server


@pytest.fixture
def begun(own: Running, tiny: Path) -> Iterator[Running]:
    """With the model's own weights, and vLLM installed, as it were."""
    own.told("/weights", weights=str(tiny))
    with vllm.installed():
        yield own
    own.told("/close_communicator/")


def said(server: Running) -> str:
    return str(server.told(PATH, prompt="abc", **SETTINGS)["choices"][0]["text"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    dtypes = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
    return {"names": [*tensors], "dtype_names": dtypes, "shapes": [list(one.shape) for one in tensors.values()]}


def joined(server: Running, pool: ThreadPoolExecutor, **more: Any) -> vllm.PyNcclCommunicator:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2, **more}
    answer = pool.submit(server.told, "/init_weight_transfer_engine", init_info=info)
    group = vllm.trainer_init(info)
    answer.result()
    return group


@pytest.mark.parametrize("packed_bytes", [None, 2**30, 5000], ids=["one by one", "packed", "in several packs"])
def test_an_update_in_parts_takes_place_when_it_is_finished(
    begun: Running, other: dict[str, Tensor], expected: tuple[str, str], packed_bytes: int | None
) -> None:
    """`VLLMClient.weight_update`; what is packed is said at the beginning, or with each part."""
    names = [*other]
    with ThreadPoolExecutor(1) as pool:
        group = joined(begun, pool, packed=packed_bytes is not None)
        begun.told("/start_weight_update")
        for part in (names[:2], names[2:]):
            tensors = {name: other[name] for name in part}
            info = described(tensors)
            if packed_bytes is not None:
                info |= {"packed": True, "packed_buffer_size_bytes": packed_bytes}
            answer = pool.submit(begun.told, "/update_weights", update_info=info)
            if packed_bytes is None:
                for tensor in tensors.values():
                    group.broadcast(tensor, 0)
            else:
                vllm.packed_nccl_broadcast_producer(iter(tensors.items()), group, 0, lambda item: item[1], packed_bytes)
            answer.result()
            assert said(begun) == expected[0]
        begun.told("/finish_weight_update")
    assert said(begun) == expected[1]


def test_an_update_of_one_call_and_one_that_is_not_whole(
    begun: Running, other: dict[str, Tensor], expected: tuple[str, str]
) -> None:
    few = dict([*other.items()][:2])
    with ThreadPoolExecutor(1) as pool:
        group = joined(begun, pool)
        for tensors, status in ((few, 400), (other, 200)):
            answer = pool.submit(begun.post, "/update_weights", update_info=described(tensors))
            for tensor in tensors.values():
                group.broadcast(tensor, 0)
            assert answer.result().status_code == status, answer.result().text
            assert said(begun) == expected[status == 200]


def test_calls_in_a_wrong_order_are_refused(own: Running, other: dict[str, Tensor]) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2}
    assert "needs vLLM beside" in own.refused("/init_weight_transfer_engine", init_info=info)["message"]
    assert "needs vLLM beside" in own.refused("/init_communicator/", port=9)["message"]
    with vllm.installed():
        bad = {**info, "rank_offset": 2}
        assert "rank_offset=2 is out of" in own.refused("/init_weight_transfer_engine", init_info=bad)["message"]
        assert "world_size=3 is not 2" in own.refused("/init_communicator/", port=9, world_size=3)["message"]
    for path, body in (
        ("/start_weight_update", {}),
        ("/finish_weight_update", {}),
        ("/update_weights", {"update_info": described(other)}),
        ("/update_named_param/", {"name": "a", "dtype": "torch.float32", "shape": [1]}),
    ):
        assert own.refused(path, 409, **body)["code"] == "wrong_state"
    assert "torch.int8" in own.refused("/update_named_param/", name="a", dtype="torch.int8", shape=[1])["message"]


def test_tensor_by_tensor_until_the_cache_is_cleared(
    begun: Running, other: dict[str, Tensor], expected: tuple[str, str]
) -> None:
    """`VLLMClient` of trl up to 1.5: answered first, then broadcast by the last rank, then all wait."""
    assert begun.http.get("/get_world_size/", follow_redirects=True).json() == {"world_size": 1}
    port = free_port()
    begun.told("/init_communicator/", host="0.0.0.0", port=port, world_size=2, client_device_uuid="42")
    group = vllm.StatelessProcessGroup.create("127.0.0.1", port, 1, 2)
    communicator = vllm.PyNcclCommunicator(group, "cpu")
    for clearing in (True, False):
        for name, tensor in other.items():
            begun.told("/update_named_param/", name=name, dtype=str(tensor.dtype), shape=list(tensor.shape))
            communicator.broadcast(tensor, 1)
            group.barrier()
        assert said(begun) == expected[0]
        if clearing:
            begun.http.post("/reset_prefix_cache/", follow_redirects=True).raise_for_status()
        else:
            begun.told("/generate/", prompts=["a"])
        assert said(begun) == expected[1]
        begun.told("/weights", weights=begun.server.front.root)


def test_a_client_that_goes_is_told_of_by_the_next_call(begun: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.server.vllm_stand_in.PATIENCE", vllm.PATIENCE / 100)
    begun.told("/init_communicator/", port=free_port())
    announced = {"name": "a", "dtype": "torch.float32", "shape": [1]}
    give_up_at = time.monotonic() + 20
    while (answer := begun.post("/update_named_param/", **announced)).status_code == 200:
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    assert answer.status_code == 409, answer.text
    begun.post("/reset_prefix_cache")
    assert begun.told("/generate/", prompts=["a"])["completion_ids"]


@pytest.mark.parametrize("prompts", [["abc", "hello"], [[256, 7, 8], [256, 9]]], ids=["texts", "ids"])
def test_generate_as_trls_server_did(begun: Running, direct: LLM, prompts: Any) -> None:
    asked: dict[str, Any] = {"n": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "max_tokens": 5}
    results = direct.generate(prompts, SamplingParams(**asked, seed=5, logprobs=2, return_prompt=True))
    outputs = [output for result in results for output in result.outputs]
    body = {**asked, "prompts": prompts, "repetition_penalty": 1.0, "images": None, "generation_kwargs": {"seed": 5}}
    older = begun.told("/generate/", **body, truncate_prompt_tokens=512, guided_decoding_regex=None)
    assert older["prompt_ids"] == [result.prompt_token_ids for result in results]
    assert older["completion_ids"] == [output.token_ids for output in outputs]
    assert older["logprobs"] == [list(output.selected_logprobs or ()) for output in outputs]
    newer = begun.told("/generate/", **body, logprobs=2, structured_outputs_regex=None)
    assert newer["completion_ids"] == older["completion_ids"]
    for output, ids, scores in zip(outputs, newer["logprob_token_ids"], newer["logprobs"], strict=True):
        for at, found in enumerate(output.logprobs or ()):
            assert dict(zip(ids[at], scores[at], strict=True)) == {i: one.logprob for i, one in (found or {}).items()}
            assert scores[at] == sorted(scores[at], reverse=True) and output.token_ids[at] in ids[at]
    none = begun.told("/generate/", **body, logprobs=None)
    assert none["logprobs"] is None and none["logprob_token_ids"] is None
    cut = begun.told("/generate/", **body, truncate_prompt_tokens=2)
    assert cut["prompt_ids"] == [(result.prompt_token_ids or [])[-2:] for result in results]
    words = begun.told("/generate/", prompts=prompts, guided_decoding_regex="(ab)+")["completion_ids"]
    assert {begun.told("/detokenize", tokens=one)["prompt"][:2] for one in words} == {"ab"}
    for wrong, named in ({"kwargs": {"best_of": 2}}, "'best_of'"), ({"max_tokens": -1}, "max_tokens=-1"):
        sent = {"generation_kwargs": wrong["kwargs"]} if "kwargs" in wrong else wrong
        assert named in begun.refused("/generate/", **{**body, **sent})["message"]


def test_chat_as_trls_server_did(begun: Running, direct: LLM) -> None:
    conversations: list[Any] = [[{"role": "user", "content": text}] for text in ("hi", "what is it?")]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"n": 2, "temperature": 0.7, "max_tokens": 5}
    body = {**asked, "messages": conversations, "logprobs": 0, "generation_kwargs": {"seed": 4}}
    for tools in (None, [tool]):
        params = SamplingParams(**asked, seed=4, logprobs=0, return_prompt=True)
        results = direct.chat(conversations, params, tools=tools)
        told = begun.told("/chat/", **body, tools=tools, chat_template_kwargs={})
        assert told["prompt_ids"] == [result.prompt_token_ids for result in results]
        outputs = [output for result in results for output in result.outputs]
        assert told["completion_ids"] == [output.token_ids for output in outputs]
        assert told["logprob_token_ids"] == [[[one] for one in output.token_ids] for output in outputs]
    assert "messages=[]" in begun.refused("/chat/", messages=[])["message"]
    assert "messages[0].role" in begun.refused("/chat/", messages=[[{"content": "a"}]])["message"]


def test_trls_own_client(
    begun: Running, other: dict[str, Tensor], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever version is installed; what it asks of a GPU is answered for it."""
    home = Path(pytest.importorskip("trl", reason="trl is not installed").__file__).parent / "generation"
    package = types.ModuleType("trl.generation")  # what else is there needs more of vLLM, and accelerate
    package.__path__ = [str(home)]
    monkeypatch.setitem(sys.modules, "trl.generation", package)
    client_module = importlib.import_module("trl.generation.vllm_client")
    model = torch.nn.Module()
    model.named_parameters = lambda: ((n, torch.nn.Parameter(one, False)) for n, one in other.items())  # type: ignore
    device = type("Device", (), {"uuid": "42"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    client = client_module.VLLMClient(base_url=begun.url, group_port=free_port())
    kwargs = {"seed": 3, "ignore_eos": True}
    first = client.generate(["abc"], max_tokens=12, generation_kwargs=kwargs)
    client.init_communicator(device=torch.device("cuda"))
    client.update_model_params(model)
    client.reset_prefix_cache()
    second = client.generate(["abc"], max_tokens=12, generation_kwargs=kwargs)
    for found, text in ((first, expected[0]), (second, expected[1])):
        [ids] = found["completion_ids"]
        assert begun.told("/detokenize", tokens=ids)["prompt"] == text
    if hasattr(client, "chat"):
        [ids] = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=3)["completion_ids"]
        assert len(ids) == 3
    client.close_communicator()
