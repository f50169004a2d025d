"""Tokenizers of directories and GGUF files: recorded ids, one interface, one answer from both, and refusals."""

import json
import threading

import pytest

from perdure import LLM, SamplingParams
from perdure.api.errors import InvalidValue, ModelLoadError, ModelNotFound
from perdure.engine.tokenizer import load_tokenizer
from perdure.models.gguf_file import GGUFFile
from perdure.models.tiny import BOS_ID, EOS_ID, make_tiny_llama
from tests.models.helpers import convert_stories260k, run_python, write_gguf, write_gguf_tokenizer

TEXTS = [
    "",
    "Hello, world",
    " two  spaces\n\nand lines\t",
    "digits 2026 and 3.14159",
    "caf\u00e9 \u4f60\u597d \U0001f680 na\u00efve",
    "don't , do . this !",
    "</s> in text",
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["directory", "gguf"])
def tiny(request, tiny_directory, tmp_path_factory):
    """The same tokenizer from both kinds of file."""
    if request.param == "directory":
        return load_tokenizer(tiny_directory)
    return load_tokenizer(write_gguf(tiny_directory, tmp_path_factory.mktemp("gguf") / "m.gguf", "F32"))


@pytest.fixture(scope="module")
def golden(request):
    return json.loads((request.config.rootpath / "tests" / "data" / "smollm2_golden.json").read_text())["gguf_fp32"]


def test_smollm2_ids_are_as_recorded(smollm2, golden):
    for case in golden:
        messages = case["messages"]
        ids = smollm2.encode(case["prompt"]) if messages is None else smollm2.apply_chat_template(messages)
        assert ids == case["prompt_ids"]


def test_smollm2_text_is_as_recorded(smollm2, golden):
    for case in golden:
        ids = case["generated_ids"]
        shown = ids if case["first_eos_index"] is None else ids[: case["first_eos_index"]]
        assert smollm2.decode(shown) == case["text"]


def test_smollm2_special_ids(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)
    assert smollm2.all_special_ids == tuple(range(17))
    assert not smollm2.adds_bos
    assert smollm2.encode("<|im_start|>") == [1]
    assert smollm2.decode([1, 504, 2]) == "The"
    assert smollm2.decode([1, 504, 2], skip_special_tokens=False) == "<|im_start|>The<|im_end|>"
    assert smollm2.id_to_piece(504) == "The"


def test_smollm2_cuts_digits_singly(smollm2):
    assert [smollm2.decode([token]) for token in smollm2.encode("1234")] == ["1", "2", "3", "4"]


def test_smollm2_directory_and_gguf_agree(smollm2, smollm2_path, tmp_path):
    write_gguf_tokenizer(GGUFFile(smollm2_path), tmp_path)
    directory = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert directory.encode(text) == smollm2.encode(text)
    assert directory.apply_chat_template(CHAT) == smollm2.apply_chat_template(CHAT)
    assert directory.all_special_ids == smollm2.all_special_ids
    assert (directory.vocab_size, directory.adds_bos) == (smollm2.vocab_size, smollm2.adds_bos)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tiny, smollm2, text):
    for tokenizer in (tiny, smollm2):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix("<s>") == text


def test_bos_and_special_ids(tiny):
    assert tiny.adds_bos
    assert tiny.encode("")[0] == tiny.bos_token_id == BOS_ID
    assert tiny.encode("a") == [BOS_ID, *tiny.encode("a", add_special_tokens=False)]
    assert (tiny.eos_token_id, tiny.all_special_ids, tiny.vocab_size) == (EOS_ID, (BOS_ID, EOS_ID), 512)
    assert tiny.decode([BOS_ID, *tiny.encode("a", False), EOS_ID]) == "a"


def test_merges_are_used(tiny):
    ids = tiny.encode(" the", add_special_tokens=False)
    assert [tiny.id_to_piece(token) for token in ids] == ["\u0120t", "he"]


def test_ids_the_vocabulary_lacks_are_no_text(tiny, smollm2):
    """A model's logits can be wider than its tokenizer."""
    for tokenizer in (tiny, smollm2):
        assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
        assert tokenizer.id_to_piece(tokenizer.vocab_size + 5) == ""


def test_chat_template(tiny):
    expected = "<s>system: Be brief.\nuser: What is 12 + 30?\n"
    assert tiny.decode(tiny.apply_chat_template(CHAT), False) == expected + "assistant: "
    assert tiny.decode(tiny.apply_chat_template(CHAT, add_generation_prompt=False), False) == expected


def _with_template(directory, tmp_path, template, kind):
    """The tiny tokenizer with another template, None for none, as a directory or a GGUF."""
    copy = make_tiny_llama(tmp_path / "copy", num_layers=1)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template or ""}))
    return load_tokenizer(copy if kind == "directory" else write_gguf(copy, tmp_path / "m.gguf", "F32"))


@pytest.mark.parametrize("kind", ["directory", "gguf"])
class TestTemplates:
    def test_none(self, tiny_directory, tmp_path, kind):
        with pytest.raises(InvalidValue, match="no chat template"):
            _with_template(tiny_directory, tmp_path, None, kind).apply_chat_template(CHAT)

    def test_one_that_refuses(self, tiny_directory, tmp_path, kind):
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(InvalidValue, match=r"refused the messages: .*roles must alternate"):
            _with_template(tiny_directory, tmp_path, template, kind).apply_chat_template(CHAT)

    def test_one_that_reaches_out(self, tiny_directory, tmp_path, kind):
        template = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
        with pytest.raises(InvalidValue, match="refused the messages"):
            _with_template(tiny_directory, tmp_path, template, kind).apply_chat_template(CHAT)

    def test_what_templates_use(self, tiny_directory, tmp_path, kind):
        template = (
            "{%- for tool in tools %}\n    {{ tool | tojson }}\n{%- endfor %}\n{% for m in messages %}\n"
            "    {% if loop.first %}\n{% continue %}\n{% endif %}\n{{ m.content }}{{ eos_token }}\n{% endfor %}\n"
            "{{ strftime_now('%Y') | length }}"
        )
        tokenizer = _with_template(tiny_directory, tmp_path, template, kind)
        text = tokenizer.decode(tokenizer.apply_chat_template(CHAT, tools=[{"name": "<caf\u00e9>"}]), False)
        assert text == '    {"name": "<caf\u00e9>"}What is 12 + 30?</s>\n4'


def test_stories260k_directory(data_dir, tmp_path):
    folder = data_dir / "stories260K"
    tokenizer = load_tokenizer(convert_stories260k(folder / "stories260K.bin", folder / "tok512.bin", tmp_path))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (512, 1, 2)
    ids = tokenizer.encode("Once upon a time, Zo\u00eb")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "Once upon a time, Zo\u00eb"


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFound, match="no such file or directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match="no tokenizer in this directory"):
        load_tokenizer(tmp_path)


def test_a_gguf_without_a_tokenizer_takes_and_gives_ids(tmp_path):
    """Not one word of a tokenizer in it: the model runs. A word and no vocabulary is a damaged file."""
    file = write_gguf(make_tiny_llama(tmp_path / "tiny"), tmp_path / "bare.gguf", "F32")
    file.write_bytes(file.read_bytes().replace(b"tokenizer.", b"something."))
    with pytest.raises(ModelNotFound, match="no tokenizer in this file"):
        load_tokenizer(file)
    with LLM(str(file), num_pages=8) as llm:
        (output,) = llm.generate([[1, 5, 6]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].text == ""
        (refused,) = llm.generate(["text"])
        assert "tokenizer" in str(refused.error)


def test_damaged_directory(tmp_path):
    directory = make_tiny_llama(tmp_path)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="the tokenizer cannot be read") as refusal:
        load_tokenizer(directory)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"gpt-2",
            b"gpt-x",
            "tokenizer.ggml.pre='gpt-x' is not supported; supported: default, gpt-2, smollm, llama-bpe",
        ),
        (b"gpt2", b"bert", "tokenizer.ggml.model='bert' is not supported; supported: 'gpt2'"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.mxrges", "'tokenizer.ggml.merges' is missing"),
        ("\u0120 t".encode(), b"tZZt", "merges do not fit the tokens"),
    ],
)
def test_gguf_tokenizers_that_are_refused(tiny_directory, tmp_path, old, new, message):
    path = write_gguf(tiny_directory, tmp_path / "m.gguf", "F32")
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(path)


def test_a_gguf_needs_no_transformers(smollm2_path):
    script = """if True:
        import sys
        from perdure.engine.tokenizer import load_tokenizer
        load_tokenizer(sys.argv[1]).apply_chat_template([{"role": "user", "content": "hi"}])
        assert "transformers" not in sys.modules
    """
    run_python(script, smollm2_path)


def test_a_long_text_lets_other_threads_go_on(smollm2):
    """A server's event loop is one: it stood still for as long as a text took, a second for a million characters."""
    text, found = "The quick brown fox jumps over the lazy dog. " * 20_000, []
    worker = threading.Thread(target=lambda: found.append(smollm2.encode(text)))
    worker.start()
    num_turns = 0
    while worker.is_alive():
        worker.join(0.001)
        num_turns += 1
    assert len(found[0]) == 200_001 and num_turns > 20
