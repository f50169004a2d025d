"""What clients of vLLM ask beside OpenAI's interface and control: TRL `/server_info` and `/get_world_size`,
lm-evaluation-harness `/tokenizer_info`. Told is what is so here, under vLLM's names."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue
from perdure.server import vllm_group
from perdure.server.front import Front
from perdure.server.protocol.vllm import ServerInfo, TokenizerInfo, WorldSize
from perdure.server.replies import json_response


async def server_info(front: Front, request: Request) -> Response:
    """weight_transfer_config is None where vLLM's communicator is not installed: clients that need it say so."""
    found = front.llm.describe()
    told = {
        "model_config": {
            "model": found["model"],
            "served_model_name": front.model,
            "dtype": f"torch.{found['dtype']}",
            "max_model_len": found["max_model_len"],
            "logprobs_mode": f"{found['logprobs_mode']}_logprobs",
            "max_logprobs": -1,
            "seed": found["seed"],
        },
        "cache_config": {
            "block_size": found["page_size"],
            "num_gpu_blocks": found["num_pages"],
            "enable_prefix_caching": found["enable_prefix_caching"],
        },
        "scheduler_config": {
            "max_num_seqs": found["max_num_seqs"],
            "max_num_batched_tokens": found["max_num_batched_tokens"],
        },
        "parallel_config": {"data_parallel_size": _num_workers(front), "tensor_parallel_size": 1},
        "weight_transfer_config": {"backend": "nccl"} if vllm_group.is_possible() else None,
    }
    return json_response(ServerInfo(vllm_config=told, configuration=found))


async def get_world_size(front: Front, request: Request) -> Response:
    """How many ranks join a trainer's group: one, for all replicas."""
    return json_response(WorldSize(world_size=1))


async def tokenizer_info(front: Front, request: Request) -> Response:
    tokenizer = front.llm.tokenizer
    if tokenizer is None:
        raise InvalidValue("the model came without a tokenizer")
    bos, eos = (
        None if token_id is None else tokenizer.id_to_piece(token_id)
        for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    return json_response(TokenizerInfo(bos_token=bos, eos_token=eos, model_max_length=front.max_model_len))


def _num_workers(front: Front) -> int:
    found: int = front.llm.describe().get("replicas", 1)
    return found
