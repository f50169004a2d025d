"""Imported once by the process that replicas are forked from: what each would import on its way, by far the dearest of
its start."""

from transformers import AutoConfig, AutoTokenizer

import perdure.engine.replica

AutoConfig.for_model("llama")  # imports the rest

__all__ = ["AutoTokenizer", "perdure"]
