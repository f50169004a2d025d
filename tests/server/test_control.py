"""Control verbs: what they do, that a wrong order changes nothing, and what is seen of it."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from perdure import LLM, Checkpoint, SamplingParams
from tests.server.conftest import Running, running

PATH = "/v1/completions"


@pytest.fixture
def own(tiny: Path) -> Iterator[Running]:
    """A server whose state a test may change."""
    with running(tiny, {"served_model_name": "tiny"}, num_pages=128, check_integrity=True) as server:
        yield server
        server.check_empty()


def test_paused_requests_wait_and_go_on(own: Running) -> None:
    assert own.http.get("/ready").status_code == 200
    own.told("/pause")
    own.told("/pause", mode="keep")
    ready = own.http.get("/ready")
    assert ready.status_code == 503 and ready.json() == {"ready": False, "state": "paused"}
    assert own.http.get("/health").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.told, PATH, prompt="a", max_tokens=3)
        own.wait_until(lambda stats: stats["num_waiting"] == 1)
        time.sleep(0.05)
        assert not call.done()
        own.told("/resume")
        assert call.result()["choices"][0]["finish_reason"] == "length"


def test_suspended_and_woken_under_vllms_names(own: Running) -> None:
    before = own.told(PATH, prompt="abc", max_tokens=8, seed=1)["choices"]
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": False}
    own.http.post("/sleep?level=1").raise_for_status()
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": True}
    for path in (PATH, "/reset"):
        assert own.refused(path, 409, **({"prompt": "a"} if path == PATH else {}))["code"] == "wrong_state"
    own.http.post("/wake_up?tags=weights").raise_for_status()
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": True}
    own.http.post("/wake_up?tags=kv_cache").raise_for_status()
    assert own.told(PATH, prompt="abc", max_tokens=8, seed=1)["choices"] == before
    own.http.post("/sleep?level=2").raise_for_status()
    assert own.refused("/resume", 409, tags=["kv"])["code"] == "wrong_state"
    assert own.stats()["state"] == "suspended"
    own.told("/resume", tags=["weights"])
    own.told("/update_weights", weights=own.server.front.root, epoch=4)
    own.told("/resume")
    told = own.told(PATH, prompt="abc", max_tokens=8, seed=1, return_token_ids=True)["choices"][0]
    assert told["text"] == before[0]["text"] and told["weight_epochs"] == [[0, 4]]


def test_weights_are_checked_before_anything_changes(own: Running, tmp_path: Path) -> None:
    for body in ({"weights": str(tmp_path / "nothing"), "epoch": 1}, {"weights": None}, {"weights": 1}, {"cache": "x"}):
        assert own.post("/weights", **body).status_code == 400
    own.told("/weights", weights=None, epoch=7)
    assert own.stats()["weight_epoch"] == 7


def test_a_checkpoint_goes_on_elsewhere(own: Running, direct: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=250, ignore_eos=True)
    [expected] = direct.generate(["abc"], params)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.told, PATH, prompt="abc", seed=5, max_tokens=250, ignore_eos=True, request_id="moving")
        own.wait_until(lambda stats: stats["num_generated_tokens"] > 3)
        data = own.post("/checkpoint", request_id="moving", end=True)
        assert data.headers["content-type"] == "application/octet-stream", data.text
        assert call.result()["choices"][0]["finish_reason"] == "abort"
    [result] = direct.generate(Checkpoint.from_bytes(data.content))
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    assert "unknown" in own.refused("/checkpoint", request_id="unknown")["message"]


def test_a_checkpoint_goes_on_over_http(own: Running) -> None:
    asked = {"prompt": "abc", "seed": 5, "max_tokens": 250, "ignore_eos": True, "n": 2, "logprobs": 1}
    expected = own.told(PATH, **asked, return_token_ids=True)["choices"]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.told, PATH, **asked, request_id="moving")
        own.wait_until(lambda stats: stats["num_running"] == 2 and stats["num_free_pages"] < stats["num_pages"] - 4)
        data = own.post("/checkpoint", request_id="moving", end=True)
        assert data.status_code == 200, data.text
        assert {choice["finish_reason"] for choice in call.result()["choices"]} == {"abort"}
    body = {"checkpoint": base64.b64encode(data.content).decode(), "return_token_ids": True}
    whole = own.told(PATH, **body)
    assert whole["choices"] == expected and whole["id"] == "moving"
    events = own.stream(PATH, **body, request_id="again")
    parts = [[choice for one in events for choice in one["choices"] if choice["index"] == index] for index in (0, 1)]
    for choice, told in zip(expected, parts, strict=True):
        assert [token for part in told for token in part["token_ids"]] == choice["token_ids"]
        assert "".join(part["text"] for part in told) == choice["text"]
        assert [x for part in told for x in part["logprobs"]["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    assert len(parts[0][0]["token_ids"]) == Checkpoint.from_bytes(data.content).samples[0].num_output
    hooked = Checkpoint.from_bytes(data.content)
    hooked = replace(hooked, params=replace(hooked.params, logits_processors=("os:getcwd",)))
    for wrong, param in (
        ({**body, "temperature": 0.5}, "temperature"),
        ({**body, "prompt": "a"}, "prompt"),
        ({"checkpoint": body["checkpoint"][:-8]}, "checkpoint"),
        ({"checkpoint": "***"}, "checkpoint"),
        ({"checkpoint": base64.b64encode(hooked.to_bytes()).decode()}, "checkpoint"),
    ):
        assert own.refused(PATH, **wrong)["param"] == param


def test_wrong_bodies_and_parameters_are_refused(own: Running) -> None:
    for path, body in (
        ("/pause", {"mode": "x"}),
        ("/pause", {"x": 1}),
        ("/suspend", {"kv": "x"}),
        ("/resume", {"tags": ["x"]}),
        ("/abort", {"request_ids": [True]}),
        ("/sleep?level=3", {}),
        ("/wake_up?tags=x", {}),
        ("/sleep?levle=2", {}),
        ("/sleep?level=1&mode=abort", {}),
        ("/sleep?level=1&level=2", {}),
        ("/sleep", {"level": 3}),
        ("/wake_up?tag=weights", {}),
        ("/reset", {"x": 1}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/destroy_weight_group", {"x": 1}),
        ("/pause?mode=keep", {"mode": "keep"}),
    ):
        own.refused(path, **body)
    assert own.stats()["state"] == "running"


def test_a_refusal_says_what_is_allowed(own: Running) -> None:
    shape = {"name": "a", "dtype": "int3", "shape": [1]}
    for path, body, words in (
        ("/pause?mode=foo", {}, "mode='foo': is none of 'abort', 'keep', 'wait'"),
        ("/suspend", {"kv": "x"}, "'recompute'"),
        ("/resume", {"tags": ["x"]}, "is none of 'kv', 'weights'"),
        ("/weights", {"shared": {"shm": "x", "tensors": [shape]}}, "'bfloat16'"),
        ("/weights", {"weights": ""}, "weights=''"),
        ("/weights", {"shared": {"file": ""}}, "shared.file=''"),
    ):
        assert words in own.refused(path, **body)["message"]
    wrong = own.http.get("/pause")
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"


def test_what_vllms_verbs_are_told_in_a_body_counts(own: Running) -> None:
    own.told("/sleep", level=2)
    own.told("/wake_up", tags=["weights"])
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": True}
    own.told("/weights", weights=own.server.front.root)
    own.http.post("/wake_up?tags=kv_cache&tags=weights").raise_for_status()
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_metrics_count_what_happened(own: Running) -> None:
    own.told(PATH, prompt=["abc", "x"], n=2, max_tokens=5, ignore_eos=True)
    own.refused(PATH, prompt=[])
    found = own.http.get("/metrics").text
    values = dict(re.findall(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", found, re.MULTILINE))
    assert float(values["vllm:generation_tokens_total"]) == 20
    assert float(values["vllm:request_success_total"]) == 4
    assert float(values["vllm:time_to_first_token_seconds_count"]) == 2
    assert float(values["vllm:request_prompt_tokens_sum"]) == float(values["vllm:prompt_tokens_total"]) > 0
    assert float(values["perdure:requests_refused_total"]) == 1
    assert 'perdure:state{model_name="tiny",state="running"} 1.0' in found


def test_the_description_describes_what_is_sent(own: Running) -> None:
    described = own.http.get("/openapi.json").json()
    schemas = {"components": described["components"]}
    paths = described["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/pause", "/v1/models/{model}"} <= set(paths)
    for path, body in (
        (PATH, {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 2}),
        ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ):
        takes = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        gives = paths[path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, takes | schemas)
        jsonschema.validate(own.told(path, **body), gives | schemas)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body | {"nobody_knows": 1}, takes | schemas)
    error = paths[PATH]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    jsonschema.validate({"error": own.refused(PATH, prompt=[])}, error | schemas)
    assert json.dumps(described)
