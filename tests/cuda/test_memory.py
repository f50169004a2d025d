"""The pool in managed memory: row life-uvm-reset. Pools are tiny: too much managed memory can hang a card."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import LLM, InvalidValue
from perdure.models.tiny import make_tiny_llama
from perdure.runner.cuda.arena import MANAGED_MOST, ManagedArena
from tests.engine.helpers import check_close, prompt, settings
from tests.witness import witness

IS_MANAGED = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED
LAST_FETCHED_TO = 4  # CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
HOST = -1


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def ask(name: str, *arguments: Any) -> int:
    """An attribute of memory, as the driver has it."""
    value = ctypes.c_int(-7)
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(ctypes.byref(value), *arguments)
    assert code == 0, f"{name} gave {code}"
    return value.value


def fetched_to(pool: torch.Tensor) -> int:
    address, size = ctypes.c_uint64(pool.data_ptr()), ctypes.c_size_t(pool.nbytes)
    return ask("cuMemRangeGetAttribute", ctypes.c_size_t(4), ctypes.c_int(LAST_FETCHED_TO), address, size)


def test_life_uvm_reset(gpu, model):
    """KV lies in managed memory; a reset fetches it to the host and back, every object stays, and the next request is
    as the first."""
    config = {"device": "cuda", "page_size": 16, "num_pages": 32, "check_integrity": True}
    prompts, params = [prompt(length) for length in (5, 33, 20)], settings(logprobs=1, prompt_logprobs=0)
    with LLM(str(model), **config) as direct:
        right = direct.generate(prompts, params)
    with LLM(str(model), kv_memory="managed", **config) as llm:
        engine = llm._engine
        runner, scheduler = engine.resolved.runner, engine._loop.scheduler
        arena, pool = runner._kv._arena, runner._kv._pool
        assert isinstance(arena, ManagedArena) and pool.nbytes <= arena.num_bytes <= MANAGED_MOST
        where = ctypes.c_uint64(pool.data_ptr())
        is_managed = ask("cuPointerGetAttribute", ctypes.c_int(IS_MANAGED), where)
        objects = [runner, arena, pool, engine._inbox, engine._loop, scheduler, scheduler._control, runner.graphs]
        for output, other in zip(llm.generate(prompts, params), right, strict=True):
            check_close(output, other)
        release, places = arena.release, [fetched_to(pool)]

        def released() -> None:
            release()
            places.append(fetched_to(pool))

        arena.release = released
        llm.reset()
        places.append(fetched_to(pool))
        assert places == [torch.cuda.current_device(), HOST, torch.cuda.current_device()]
        again = [runner, arena, pool, engine._inbox, engine._loop, scheduler, scheduler._control, runner.graphs]
        assert all(one is other for one, other in zip(objects, again)) and pool.data_ptr() == where.value
        for output, other in zip(llm.generate(prompts, params), right, strict=True):
            check_close(output, other)
            assert output.num_cached_tokens == 0
        with pytest.raises(InvalidValue, match="kv='offload' is not for kv_memory='managed'"):
            llm.suspend(kv="offload")
        llm.suspend(kv="recompute")
        assert places[-1] == HOST
        llm.resume()
        for output, other in zip(llm.generate(prompts, params), right, strict=True):
            check_close(output, other)
        witness("life-uvm-reset", is_managed=is_managed, bytes=pool.nbytes, fetches=len(places), objects=len(objects))


def test_a_managed_pool_of_more_than_a_gigabyte_is_refused(gpu, model):
    """Before anything is allocated."""
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    with pytest.raises(InvalidValue, match=rf"a pool of \d+ bytes is more than {MANAGED_MOST}"):
        LLM(str(model), device="cuda", kv_memory="managed", num_pages=MANAGED_MOST // page_bytes + 1)


def test_a_pool_that_is_refused_leaves_nothing_to_give_back(monkeypatch):
    """An object whose constructor raised is let go like any other. Needs no GPU: nothing is asked of the driver."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(ValueError, match="a pool of"):
        ManagedArena(MANAGED_MOST + 1)
    gc.collect()
    assert not unraisable
