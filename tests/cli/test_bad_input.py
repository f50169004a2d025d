"""Bad input, from the command line: one clear line on stderr, exit code 2, no traceback, nothing on stdout."""

import json
import shutil
import struct
from pathlib import Path

import pytest


@pytest.fixture
def refused(perdure):
    """Runs a command that must be refused with all of these words."""

    def check(*arguments, words, stdin=b""):
        done = perdure(*arguments, stdin=stdin)
        assert (done.code, done.out) == (2, ""), done
        assert done.err.startswith("perdure: ") and done.err.count("\n") == 1, done.err
        missing = [word for word in words if word not in done.err]
        assert not missing, done.err

    return check


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-p", "2"], ["top_p=2.0", "(0, 1]"]),
        (["--temperature", "-1"], ["temperature=-1"]),
        (["--temperature", "nan"], ["temperature=nan"]),
        (["--max-tokens", "-1"], ["max_tokens=-1"]),
        (["--max-tokens", "many"], ["--max-tokens", "integer"]),
        (["--top-k", "-2"], ["top_k=-2"]),
        (["--min-p", "1.5"], ["min_p=1.5"]),
        (["--stop", ""], ["stop", "''"]),
        (["--repetition-penalty", "0"], ["repetition_penalty=0.0"]),
        (["--presence-penalty", "3"], ["presence_penalty=3.0", "2.0"]),
        (["--frequency-penalty", "-3"], ["frequency_penalty=-3.0", "-2.0"]),
        (["--logit-bias", "7"], ["--logit-bias", "'7'", "ID=X"]),
        (["--logit-bias", "a=1"], ["logit_bias", "'a'"]),
        (["--bad-word", ""], ["bad_words", "''"]),
        (["--regex", "a", "--choice", "b"], ["structured_outputs", "regex and choice given"]),
        (["--choice", ""], ["structured_outputs.choice", "''"]),
        (["--json-schema", "/no/such/file"], ["--json-schema", "'/no/such/file'", "No such file"]),
        (["--json-schema", ""], ["--json-schema", "file's name is empty"]),
        (["--grammar", ""], ["--grammar", "file's name is empty"]),
        (["--grammar", "/no/such/file"], ["--grammar", "'/no/such/file'", "No such file"]),
        (["--grammar", "/dev/null"], ["structured_outputs.grammar", "''"]),
        (["--regex", "a", "--json-object"], ["structured_outputs", "regex and json_object given"]),
        (["--min-tokens", "-1"], ["min_tokens=-1"]),
        (["--json-schema", "/dev/null"], ["structured_outputs.json", "is no JSON"]),
        (["--logprobs", "2"], ["--logprobs=2", "--json"]),
        (["--logprobs", "-2", "--json"], ["logprobs=-2"]),
        (["--page-size", "0"], ["page_size=0", "1 to 256"]),
        (["--steps-in-flight", "5"], ["steps_in_flight=5", "1 to 4"]),
        (["--num-cuda-graphs", "-2"], ["num_cuda_graphs=-2", "-1 to 4096"]),
        (["--cuda-graph-max-tokens", "0"], ["cuda_graph_max_tokens=0", "1 to 1048576"]),
        (["--cuda-graph-mixed-prefill", "-1"], ["cuda_graph_mixed_prefill=-1", "0 to 65536"]),
        (["--cuda-graph-sizing", "cubic"], ["cuda_graph_sizing='cubic'", "exponential, linear, hybrid"]),
        (["--device", "cpu", "--attention-backend", "hopper"], ["attention_backend='hopper'", "device='cpu'", "tiled"]),
        (["--device", "cpu", "--linear-backend", "triton"], ["linear_backend='triton'", "device='cpu'", "packed"]),
        (["--device", "cpu", "--sampling-backend", "flashinfer"], ["sampling_backend='flashinfer'", "torch"]),
        (["--device", "cpu", "--kv-memory", "managed"], ["kv_memory='managed'", "device='cpu'"]),
        (["--dtype", "int3"], ["dtype='int3'", "float32"]),
        (["--load-format", "pickle"], ["load_format='pickle'", "dummy"]),
        (["--quantization", "awq"], ["quantization='awq'", "gguf"]),
        (["--quantization", "gguf", "--dtype", "bfloat16"], ["dtype='bfloat16'", "quantization='gguf'", "float32"]),
        (["--quantization", "gguf", "--load-format", "dummy"], ["load_format='dummy'", "quantization='gguf'", "auto"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--ids", "1,x"], ["--ids", "'x'"]),
        (["--ids", "\u0663"], ["--ids", "is not a token id"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_a_bad_option(refused, arguments, words):
    """Seen before any model is looked for."""
    refused("generate", "Hello", "--model", "/nowhere", *arguments, words=words)


def test_a_bad_command_line(refused, tmp_path):
    refused("generate", words=["PROMPT", "--ids"])
    refused("generate", "-", "-", words=["stdin"])
    refused("generate", "Hello", "--chat", "--ids", "1", words=["--chat", "--ids"])
    refused("logprobs", words=["TEXT", "--ids"])
    refused("logprobs", "Hello", "--ids", "1", words=["TEXT", "--ids"])
    refused("gnerate", "Hello", words=["gnerate"])
    refused("make-tiny", "llama", words=["DIR"])
    refused("make-tiny", "gpt5", tmp_path / "new", words=["gpt5", "llama"])
    refused("generate", "-", "--model", "/nowhere", stdin=b"caf\xe9", words=["UTF-8", "0xe9"])
    refused("generate", "caf\udce9", "--model", "/nowhere", words=["UTF-8"])


def test_make_tiny_overwrites_nothing(refused, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    refused("make-tiny", "llama", tmp_path, words=[str(tmp_path), "not empty"])
    refused("make-tiny", "llama", tmp_path / "config.json", words=["config.json", "exists"])
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy of the tiny model, to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_a_missing_model(refused, tmp_path):
    for command in ("generate", "logprobs"):
        refused(command, "Hello", "--model", tmp_path / "gone", words=[str(tmp_path / "gone"), "no such"])
    for command in ("info", "chat"):
        refused(command, "--model", tmp_path / "gone", words=[str(tmp_path / "gone"), "no such"])
    refused("info", "--model", tmp_path, words=[str(tmp_path), "config.json"])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_half_a_directory(refused, broken, name):
    (broken / name).unlink()
    refused("info", "--model", broken, words=[str(broken), name])


def test_damaged_files_of_a_directory(refused, broken):
    weights = (broken / "model.safetensors").read_bytes()
    for length in (0, 4, 100, len(weights) // 2, len(weights) - 1):
        (broken / "model.safetensors").write_bytes(weights[:length])
        refused("info", "--model", broken, words=["model.safetensors"])
    (broken / "model.safetensors").write_bytes(weights)
    (broken / "tokenizer.json").write_text("{")
    refused("info", "--model", broken, words=["tokenizer"])
    (broken / "config.json").write_text("{")
    refused("info", "--model", broken, words=["config.json"])


def test_a_missing_shard(perdure, refused, tmp_path):
    perdure("make-tiny", "llama", tmp_path / "model", "--num-shards", "2")
    lost = tmp_path / "model" / "model-00002-of-00002.safetensors"
    lost.unlink()
    refused("info", "--model", tmp_path / "model", words=[lost.name, "missing"])


def test_pickled_weights(refused, broken):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    refused("info", "--model", broken, words=["pickled", "pytorch_model.bin"])
    refused("info", "--model", broken / "pytorch_model.bin", words=["pickled", "pytorch_model.bin"])


def test_an_unsupported_architecture(refused, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    refused("info", "--model", broken, words=["GPT2LMHeadModel", "supported", "LlamaForCausalLM"])


def gguf_header(tensor_type: int) -> bytes:
    """A GGUF of no metadata and one tensor of 32 elements."""
    name = b"output.weight"
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, tensor_type, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry


def test_a_gguf_of_an_unknown_type(refused, tmp_path):
    file = tmp_path / "model.gguf"
    for tensor_type, name in ((34, "TQ1_0"), (199, "199")):
        file.write_bytes(gguf_header(tensor_type).ljust(4096, b"\0"))
        refused("info", "--model", file, words=[str(file), name, "Q8_0"])


def test_a_gguf_cut_short(refused, tmp_path, smollm2_path):
    file = tmp_path / "model.gguf"
    with smollm2_path.open("rb") as whole:
        beginning = whole.read(1 << 22)
    for length in (0, 3, 4, 20, 1000, 1 << 20, len(beginning)):
        file.write_bytes(beginning[:length])
        refused("info", "--model", file, words=[str(file)])


def test_a_prompt_that_cannot_run(refused, tiny):
    model = ("--model", tiny)
    refused("generate", "x" * 600, *model, words=["601 tokens", "max_model_len is 256"])
    refused("logprobs", "x" * 600, *model, words=["601 tokens", "max_model_len is 256"])
    refused("generate", "--ids", ",".join(["1"] * 40), *model, "--max-model-len", "40", words=["40"])
    refused("generate", "--ids", "", *model, words=["empty"])
    refused("logprobs", "--ids", "", *model, words=["empty"])
    refused("logprobs", "--ids", "", "--continuation", "x", *model, words=["empty"])
    refused("info", *model, "--max-model-len", "300", words=["max_model_len=300", "256"])


def test_a_grammar_that_cannot_be_compiled(refused, tiny):
    refused("generate", "Hi", "--model", tiny, "--regex", "[a", words=["structured_outputs.regex='[a'", "unclosed"])


@pytest.mark.parametrize("ids", ["1,512", "-1,3", "99999999999999999999"])
def test_ids_out_of_range(refused, tiny, ids):
    wrong = next(one for one in ids.split(",") if one not in ("1", "3"))
    for command in ("generate", "logprobs"):
        refused(
            command,
            f"--ids={ids}",
            "--model",
            tiny,
            words=[f"={wrong} ", "0 to 511" if int(wrong) < 2**63 else "0 to vocab_size - 1"],
        )


def test_a_journal_that_cannot_be_written(refused, tiny, tmp_path):
    refused("info", "--model", tiny, "--journal", tmp_path / "no" / "file", words=["journal", "No such"])
