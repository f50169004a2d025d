"""`perdure serve --config`: the file's options are the command's, and nothing in it is passed over."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from perdure import EngineConfig
from perdure.cli.options import EngineOptions
from perdure.server import serve as server
from perdure.server.config import ServeConfig
from tests.cli.conftest import Finished

FILE = """
model: somewhere
port: 9000
max_num_seqs: 7        # underscores or
data-parallel-size: 2  # dashes, as on the command line
enable_prefix_caching: false
max_burst_ms: 5
num_cuda_graphs: 9
cuda_graph_max_tokens: 256
cuda_graph_mixed_prefill: 0
cuda_graph_sizing: linear
cuda_graph_all_prefills: true
attention_backend: tiled
linear-backend: reference
open_control: true
drain_timeout: 5
allowed_origin: [https://a.example, https://b.example]
api_key: secret
reasoning_parser: think
served_model_name: null
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServeConfig]]:
    """What a server would have been started with."""
    found: list[tuple[EngineConfig, ServeConfig]] = []
    monkeypatch.setattr(server, "serve", lambda config, serving, say: found.append((config, serving)))
    return found


def test_a_file_gives_options_and_the_command_line_wins(
    perdure: Callable[..., Finished], started: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    more = ("--max-num-seqs", 8, "--cuda-graph-max-tokens", 1024, "--api-key", "other", "--enable-prefix-caching")
    forms = ("--attention-backend", "native", "--sampling-backend", "torch", "--no-cuda-graph-all-prefills")
    for given in ((), ("--port", 9001, *more, *forms, "model")):
        done = perdure("serve", "--config", path, *given)
        assert done.code == 0, done.err
    (engine, serving), (other_engine, other_serving) = started
    assert (engine.model, engine.max_num_seqs, engine.data_parallel_size) == ("somewhere", 7, 2)
    assert not engine.enable_prefix_caching and engine.max_burst_ms == 5
    assert (engine.num_cuda_graphs, engine.cuda_graph_max_tokens, engine.cuda_graph_mixed_prefill) == (9, 256, 0)
    assert (engine.cuda_graph_sizing, engine.cuda_graph_all_prefills) == ("linear", True)
    assert (engine.attention_backend, engine.linear_backend, engine.sampling_backend) == ("tiled", "reference", "auto")
    assert (serving.port, serving.open_control, serving.drain_timeout_s) == (9000, True, 5.0)
    assert serving.allowed_origins == ("https://a.example", "https://b.example") and serving.api_keys == ("secret",)
    assert serving.reasoning_parser == "think" and serving.served_model_name is None
    assert (other_engine.model, other_engine.max_num_seqs, other_engine.enable_prefix_caching) == ("model", 8, True)
    assert (other_engine.num_cuda_graphs, other_engine.cuda_graph_max_tokens) == (9, 1024)
    assert (other_engine.attention_backend, other_engine.sampling_backend) == ("native", "torch")
    assert other_engine.linear_backend == "reference" and not other_engine.cuda_graph_all_prefills
    assert (other_serving.port, other_serving.api_keys) == (9001, ("other",))
    assert other_engine.data_parallel_size == 2 and other_serving.allowed_origins == serving.allowed_origins


def test_commands_take_every_setting_that_the_page_on_gpus_names() -> None:
    _, table = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text().split("| setting | default | |\n")
    rows = table.split("\n\n")[0].splitlines()[1:]
    named = {name for row in rows for name in re.findall("`(.*?)`", row.split(" | ")[0])}
    assert len(named) > len(rows) and named <= {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", "'prot'"),
        ("config: x", "'config'"),
        ("model-argument: x", "'model-argument'"),
        ("port: 1\nport: 2", "'port' twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "'max_num_seqs' twice"),
        ("port: yes", "port=True: expected `int`"),
        ("port: '1'", "port='1': expected `int`"),
        ("drain_timeout: soon", "drain_timeout='soon': expected `float`"),
        ("open_control: 1", "open_control=1: expected `bool`"),
        ("served_model_name: 3", "served_model_name=3: expected `str"),
        ("host: [a]", "host=['a']: expected `str`"),
        ("api_key: [a, 1]", "api_key=['a', 1]: expected `str`"),
        ("journal: 7", "journal=7: expected str"),
        ("port: 70000", "port=70000"),
        ("[1]", "no `option: value` lines"),
        ("a: b: c", "is no YAML"),
        ("model: !!python/object/apply:os.getcwd []", "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    perdure: Callable[..., Finished], started: list[Any], tmp_path: Path, text: str | None, told: str
) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    done = perdure("serve", "--config", path)
    assert done.code == 2 and told in done.err and not started
