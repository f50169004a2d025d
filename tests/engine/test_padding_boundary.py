"""Row invariant-padding-boundary: with bitwise results the rows a step is padded to are nothing to its requests."""

from __future__ import annotations

from tests.engine.conftest import DEVICES, MakeLLM
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness

ONE, OTHERS = prompt(1), [prompt(1 + n % 40, seed=2) for n in range(64)]


@DEVICES
def test_invariant_padding_boundary(make_llm: MakeLLM, device: str) -> None:
    """A prompt of one token alone, then among 65 on each of two replicas: its steps have 64 rows, then 128."""
    mine = settings(max_tokens=12, temperature=0.9, seed=4, logprobs=-1, prompt_logprobs=0)
    others = [settings(max_tokens=5 + n % 9, temperature=n % 3 / 2, seed=n, logprobs=n % 4) for n in range(64)]
    rows: list[int] = []
    direct = None
    for replica in (0, 1):
        llm = make_llm(
            replica=replica,
            batch_invariant=True,
            dtype="bfloat16" if device == "cuda" else "float32",
            num_cuda_graphs=2,
            cuda_graph_sizing="linear",
            cuda_graph_mixed_prefill=0,
            max_num_seqs=128,
            num_pages=640,
            enable_prefix_caching=False,
        )
        steps = llm._engine.resolved.runner.shapes.num_steps
        (alone,) = llm.generate([ONE], mine)
        rows += [shape.num_tokens for shape, count in steps.items() if count]
        steps.update(dict.fromkeys(steps, 0))
        direct = direct or alone
        check_equal(alone, direct)
        outputs = llm.generate([ONE, *OTHERS], [mine, *others])
        check_equal(outputs[0], direct)
        for output, ids, params in zip(outputs[20:23], OTHERS[19:22], others[19:22]):
            check_equal(llm.generate([ids], params)[0], output)
        assert all(output.exact for output in outputs)
        rows.append(max(shape.num_tokens for shape, count in steps.items() if count))
    assert rows == [64, 128] * 2
    witness("invariant-padding-boundary", rows=rows, num_others=len(OTHERS))
