"""perdure runs language models for rollouts, evaluation and serving.

The public names are those in `__all__`. They load when first used, so that `import perdure.core` pulls no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Client",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "EngineConfig",
    "Checkpoint",
    "Trace",
    "PerdureError",
    "InvalidValue",
    "MaxSequenceLengthOverflow",
    "ModelLoadError",
    "ModelNotFound",
    "StateError",
    "DeviceError",
    "QueueFull",
    "EngineDead",
    "StepFailed",
    "BadLogits",
    "NothingToSample",
    "ReplicaLost",
    "JournalError",
    "__version__",
]

# name -> the module that holds it; a type checker reads the same table from the imports below
_HOMES = {
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

if TYPE_CHECKING:
    from perdure.api.checkpoint import Checkpoint
    from perdure.api.config import EngineConfig
    from perdure.api.errors import (
        BadLogits,
        DeviceError,
        EngineDead,
        InvalidValue,
        JournalError,
        MaxSequenceLengthOverflow,
        ModelLoadError,
        ModelNotFound,
        NothingToSample,
        PerdureError,
        QueueFull,
        ReplicaLost,
        StateError,
        StepFailed,
    )
    from perdure.api.output import RequestOutput
    from perdure.api.sampling import SamplingParams
    from perdure.api.structured import StructuredOutputsParams
    from perdure.engine.async_llm import AsyncLLM
    from perdure.engine.client import Client
    from perdure.engine.llm import LLM
    from perdure.trace.trace import Trace
else:

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'perdure' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
