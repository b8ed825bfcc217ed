"""Upstream's pipeline schedules on gloo, for benchmarks: in every process of `run_world`, one stage."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def begin(num_chunks: int, **sizes: Any) -> Any:
    """Make this process a stage of `num_chunks` model chunks; upstream's configuration, with `sizes` of its own."""
    from megatron_wlb.adapter import cpu

    if "megatron" not in sys.modules:  # else the parent has done it
        cpu.install()
    from megatron.core import mpu
    from megatron.core.transformer import TransformerConfig

    chunks = num_chunks if num_chunks > 1 else None
    pipeline: dict[str, Any] = {
        "pipeline_model_parallel_size": dist.get_world_size(),
        "virtual_pipeline_model_parallel_size": chunks,
    }
    mpu.initialize_model_parallel(**pipeline, create_gloo_process_groups=True)
    return TransformerConfig(
        **pipeline,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        overlap_p2p_comm=chunks is not None,
        overlap_p2p_comm_warmup_flush=chunks is not None,
        batch_p2p_comm=chunks is None,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # asked for with variable lengths, experts or not
        **sizes,
    )


def planned(config: Any, tokens: Sequence[int]) -> Any:
    """Our communicator, which knows the lengths of the micro-batches."""
    from megatron.core import mpu

    from megatron_wlb.adapter.p2p import PlannedP2PCommunicator

    return PlannedP2PCommunicator(mpu.get_pipeline_model_parallel_group(), config, tokens)


class Chunk(torch.nn.Module):
    """A model chunk as upstream's schedules want it. `forward` is called with what `step` is given."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model_type = config, None
        self.input: torch.Tensor | None = None
        """[tokens, 1, hidden size], but on the first chunk of all."""

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor


def step(chunks: Sequence[Chunk], feeds: Sequence[Sequence[Any]], communicator: Any, max_tokens: int) -> None:
    """Forward and backward of a step; `feeds` has the arguments of every chunk's calls, by micro-batch. The
    communicator is ours (`planned`) or upstream's."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    iterators = [iter(feed) for feed in feeds]
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(feeds[0]),
        seq_length=max_tokens,
        micro_batch_size=1,
        forward_only=False,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    if hasattr(communicator, "settle"):
        communicator.settle()


def _forward_step(iterator: Any, chunk: Chunk) -> Any:
    return chunk(*next(iterator)), _loss


def _loss(output: torch.Tensor) -> Any:
    loss = output.sum()
    return loss, torch.tensor(output.shape[0]), {"loss": torch.stack([loss.detach(), torch.tensor(1.0)])}
