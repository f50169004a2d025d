"""The public names, frozen: adding or removing one is a decision, made here."""

import pytest

import perdure

PUBLIC = {
    "LLM": "perdure.engine.llm",
    "AsyncLLM": "perdure.engine.async_llm",
    "Client": "perdure.engine.client",
    "SamplingParams": "perdure.api.sampling",
    "StructuredOutputsParams": "perdure.api.structured",
    "RequestOutput": "perdure.api.output",
    "EngineConfig": "perdure.api.config",
    "Checkpoint": "perdure.api.checkpoint",
    "Trace": "perdure.trace.trace",
    "PerdureError": "perdure.api.errors",
    "InvalidValue": "perdure.api.errors",
    "MaxSequenceLengthOverflow": "perdure.api.errors",
    "ModelLoadError": "perdure.api.errors",
    "ModelNotFound": "perdure.api.errors",
    "StateError": "perdure.api.errors",
    "DeviceError": "perdure.api.errors",
    "QueueFull": "perdure.api.errors",
    "EngineDead": "perdure.api.errors",
    "StepFailed": "perdure.api.errors",
    "BadLogits": "perdure.api.errors",
    "NothingToSample": "perdure.api.errors",
    "ReplicaLost": "perdure.api.errors",
    "JournalError": "perdure.api.errors",
}


def test_the_list_of_public_names():
    assert perdure.__all__ == [*PUBLIC, "__version__"]
    assert set(perdure.__all__) <= set(dir(perdure))
    assert isinstance(perdure.__version__, str)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves(name):
    value = getattr(perdure, name)
    assert (value.__name__, value.__module__) == (name, PUBLIC[name])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        perdure.Nothing  # noqa: B018
