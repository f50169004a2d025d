"""One tiny model for all, and one thread: barriers of two cost milliseconds on a busy machine."""

from collections.abc import Iterator

import pytest
import torch

from perdure.models.llama import LlamaModel
from tests.runner.plans import tiny_model


@pytest.fixture(scope="session")
def model() -> LlamaModel:
    return tiny_model()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
