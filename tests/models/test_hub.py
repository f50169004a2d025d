"""Hub ids: the local cache first, then the network; one line when neither has it. Nothing here leaves this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from perdure import LLM
from perdure.api.errors import ModelLoadError, ModelNotFound
from perdure.models.hub import find_on_hub, is_hub_id
from perdure.models.tiny import make_tiny_llama
from tests.models.hub import FakeHub, cache, serving

NAME = "someone/tiny-llama"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    directory = make_tiny_llama(tmp_path_factory.mktemp("files"))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty HF_HOME, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def online(home, monkeypatch):
    """Puts a fake Hub on the network."""

    def use(address: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return use


def message(name: str = NAME) -> str:
    with pytest.raises(ModelNotFound) as caught:
        find_on_hub(name)
    text = str(caught.value)
    assert "\n" not in text and name in text
    return text


def test_a_cached_model_runs_offline(files, tmp_path):
    """In a process of its own, with nothing but HF_HOME and HF_HUB_OFFLINE in its environment; and it is quiet."""
    snapshot = cache(tmp_path, NAME, files)
    program = f"from perdure import LLM\nllm = LLM({NAME!r})\nprint(llm.describe()['model'])\nllm.generate([[1, 2]])"
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{snapshot}\n", "")


def test_neither_cached_nor_online(home):
    text = message()
    assert "not in the Hugging Face cache" in text and str(home / "hub") in text and "HF_HUB_OFFLINE" in text


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_half_a_model_is_not_taken_for_one(home, files, lost):
    cache(home, NAME, {name: data for name, data in files.items() if name != lost})
    assert "incomplete in the Hugging Face cache" in message()


def test_a_lost_shard_is_noticed(home, tmp_path):
    directory = make_tiny_llama(tmp_path / "shards", num_shards=2)
    sharded = {path.name: path.read_bytes() for path in directory.iterdir()}
    snapshot = cache(home, NAME, sharded)
    assert find_on_hub(NAME) == snapshot
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert "incomplete" in message()


def test_what_is_fetched(home, online, files, capfd):
    """Weights, JSON and the tokenizer; no code, no pickles, no second set of weights. And nothing is shown."""
    unwanted = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "onnx/config.json": b"{}"}
    unwanted |= {"consolidated.safetensors": b"the same again", "README.md": b"# a model"}
    hub = FakeHub(NAME, files | unwanted)
    with serving(hub) as address:
        online(address)
        directory = find_on_hub(NAME)
        assert {path.name for path in directory.iterdir()} == set(files) == set(hub.fetched)
        assert all((directory / name).read_bytes() == data for name, data in files.items())
        hub.fetched.clear()
        assert find_on_hub(NAME) == directory and not hub.fetched
    assert find_on_hub(NAME) == directory  # and the network may go
    assert capfd.readouterr() == ("", "")


def test_the_rest_is_fetched(home, online, files):
    """A cache that has the tokenizer alone."""
    cache(home, NAME, {"tokenizer.json": files["tokenizer.json"]})
    with serving(FakeHub(NAME, files)) as address:
        online(address)
        assert (find_on_hub(NAME) / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize(("status", "words"), [(200, "does not know it"), (401, "private"), (403, "terms")])
def test_the_hub_refuses(home, online, files, status, words):
    with serving(FakeHub("another/model", files, status)) as address:
        online(address)
        assert words in message()


def test_the_hub_cannot_be_reached(home, online):
    online("http://127.0.0.1:9")
    assert "cannot be reached" in message()


def test_a_repository_of_pickles_is_refused(home, online, files):
    pickled = {name.replace("model.safetensors", "pytorch_model.bin"): data for name, data in files.items()}
    with serving(FakeHub(NAME, pickled)) as address:
        online(address)
        with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
            LLM(NAME)


def test_a_path_that_exists_wins(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_llama(tmp_path / "someone" / "tiny-llama")
    with LLM(NAME) as llm:
        assert llm.describe()["model"] == NAME


@pytest.mark.parametrize(
    ("name", "is_id"),
    [(NAME, True), ("Qwen/Qwen2.5-0.5B", True), ("a/b.gguf", False), ("/a/b", False), ("./b", False), ("a", False)],
)
def test_what_a_hub_id_looks_like(name, is_id):
    assert is_hub_id(name) == is_id


def test_no_valid_id(home):
    assert "no Hub id" in message("someone/bad..name")
