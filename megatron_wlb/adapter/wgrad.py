"""Deferred weight gradients: linear layers that defer them, and when they run.

TransformerEngine's layers can defer (`delay_wgrad_compute`), and `defer` adds this to upstream's own layers. In
backward, a layer queues the inputs of its weight gradient. `backward_dw` computes the oldest one and calls the hooks
through which upstream's DDP accumulates it. Upstream itself runs `backward_dw` only to overlap expert communication.

Some layers overlap the weight gradient with the reduction of their input gradient over tensor-parallel ranks. They do
not defer, except for the output layer, whose product takes far longer than the reduction.
"""

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute, unwrap_model

from megatron_wlb.pipeline.schedule import Schedule

Measured = Callable[[], contextlib.AbstractContextManager[None]]


def defer(chunks: list[Any], bulk: bool = False) -> list[Any]:
    """Choose the linear layers that defer weight gradients; a `pre_wrap_hook` of upstream's model.

    `bulk`: others overlap theirs with communication in user buffers (`tp_comm_bulk_wgrad`).
    """
    for chunk in chunks:
        for module in chunk.modules():
            kinds = layers.ColumnParallelLinear | layers.RowParallelLinear
            if module is not getattr(chunk, "output_layer", None) and _reduces_input_gradient(module):
                if _defers(module):
                    _keep(module)
                    module.ub_bulk_wgrad = bulk and not module.ub_overlap_rs_dgrad
            elif isinstance(module, kinds) and module.weight is not None and module.weight.requires_grad:
                _defer(module)
            elif _defers(module):
                _forget_graph(module)
    return chunks


def _reduces_input_gradient(module: Any) -> bool:
    if isinstance(module, layers.ColumnParallelLinear):
        return (module.sequence_parallel or module.allreduce_dgrad) and not module.explicit_expert_comm
    return getattr(module, "parallel_mode", None) == "column" and module.tp_size > 1


def _keep(linear: Any) -> None:
    """Make a TransformerEngine layer compute its weight gradient in backward."""
    linear.wgrad_store = type(linear.wgrad_store)()
    for weight in _weights(linear):
        weight.skip_backward_post_hook = False  # type: ignore[attr-defined]


def _forget_graph(linear: Any) -> None:
    """Make a TransformerEngine layer queue tensors without their graph, which would keep the chunk's input."""
    put = linear.wgrad_store.put

    def detached(tensors: list[Any], function: Any) -> None:
        put([each.detach() if isinstance(each, torch.Tensor) else each for each in tensors], function)

    linear.wgrad_store.put = detached


def _defer(linear: Any) -> None:
    """Give one of upstream's layers the interface of TransformerEngine's."""
    hooks: list[Callable[[], None]] = []
    waiting: Any = queue.Queue()
    linear.wgrad_store = SimpleNamespace(
        context=waiting,
        delay_wgrad_compute=lambda: True,
        put=lambda tensors, product: waiting.put([tensors, product]),
    )
    linear.register_wgrad_accumulation_and_reduce_hooks = hooks.append
    linear.weight.skip_backward_post_hook = True  # for upstream's DDP

    def forward(
        *,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **unused: Any,
    ) -> torch.Tensor:
        divided, store = tp_group if sequence_parallel else None, linear.wgrad_store

        def later(x: torch.Tensor, gradient: torch.Tensor) -> None:
            store.put([x, gradient], partial(product, divided))

        return _Linear.apply(input, weight, bias, divided, tp_group if allreduce_dgrad else None, later)

    def product(divided: Any, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        weight = linear.weight
        if divided is not None:
            x = mappings._gather_along_first_dim(x, divided)
        gradient, x = prepare_input_tensors_for_wgrad_compute(gradient, x)
        if linear.gradient_accumulation_fusion:
            fused = layers.fused_weight_gradient_mlp_cuda
            in_fp32 = weight.main_grad.dtype == torch.float32
            add = fused.wgrad_gemm_accum_fp32 if in_fp32 else fused.wgrad_gemm_accum_fp16
            add(x, gradient, weight.main_grad)
            weight.grad_added_to_main_grad = True
            return None, None
        return gradient.t().matmul(x), None

    def backward_dw() -> None:
        tensors, compute = waiting.get_nowait()
        computed, _ = compute(*tensors)
        if computed is not None:
            linear.weight.grad = computed
        for hook in hooks:
            hook()

    linear._forward_impl, linear.backward_dw = forward, backward_dw


class _Linear(torch.autograd.Function):
    """Upstream's linear layer; passes inputs of the weight gradient to `later`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        divided: Any,
        summed: Any,
        later: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        """`divided`: group that divides rows of x; `summed`: that sums its gradient."""
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.divided, ctx.summed, ctx.later = bias is not None, divided, summed, later
        rows = x if divided is None else mappings._gather_along_first_dim(x, divided)
        output = torch.matmul(rows, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.later(x.detach(), gradient)
        of_input = gradient.matmul(weight)
        if ctx.divided is not None:
            of_input = mappings._reduce_scatter_along_first_dim(of_input, ctx.divided)
        elif ctx.summed is not None:
            torch.distributed.all_reduce(of_input, group=ctx.summed)
        of_bias = gradient.flatten(0, -2).sum(dim=0) if ctx.biased else None
        return of_input, None, of_bias, None, None, None


class DeferredWeightGradients:
    """The deferred weight gradients of this rank's model chunks.

    `chunks` are wrapped in upstream's DDP; `counts`: parts that the plan has for each; `measured` makes a context
    manager for each part. Raises RuntimeError if chunks have other parts, and for layers that could lose gradients.
    """

    def __init__(self, chunks: Sequence[Any], counts: Sequence[int], measured: Measured) -> None:
        self._measured = measured
        self._parts = [_parts(unwrap_model(chunk)) for chunk in chunks]
        self._groups = [chunk.bucket_groups + chunk.expert_parallel_bucket_groups for chunk in chunks]
        known = {id(module) for parts in self._parts for part in parts for module in part}
        if strange := [type(m).__name__ for c in chunks for m in c.modules() if _defers(m) and id(m) not in known]:
            raise RuntimeError(
                f"{strange[0]} defers gradients, and the plan does not know of it; give --wlb-defer-weight-gradients "
                "off, and report it with the flags"
            )
        if [len(parts) for parts in self._parts] != list(counts):
            raise RuntimeError(
                f"weight gradients of {[len(parts) for parts in self._parts]} layers by model chunk can be deferred, "
                f"and the plan has {list(counts)}; give --wlb-defer-weight-gradients off, and report it with the flags"
            )
        for module in (module for parts in self._parts for part in parts for module in part):
            for weight in _weights(module):
                if not getattr(weight, "skip_backward_post_hook", False):
                    raise RuntimeError(
                        f"{type(module).__name__} defers gradients that would be lost; this TransformerEngine is too "
                        "old for --wlb-defer-weight-gradients, give off"
                    )
                # With fused accumulation, backward returns a meaningless gradient for hooks that now run later.
                weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))

    @contextlib.contextmanager
    def step(self, schedule: Schedule, stage: int, before: np.ndarray, config: Any) -> Iterator["Step"]:
        """Enter around a forward-backward pass, which reads `config` inside.

        `before` is this stage's part of the plan's `weight_gradients_before`.
        """
        step = Step(self._parts, self._groups, schedule, stage, before, config, self._measured)
        given = config.batch_p2p_comm, config.grad_sync_func, config.finalize_model_grads_func
        config.batch_p2p_comm = False  # it synchronises the device after every transfer
        config.grad_sync_func = step.reduced_later(config.grad_sync_func)
        config.finalize_model_grads_func = step.finished_before(config.finalize_model_grads_func)
        try:
            yield step
        finally:
            config.batch_p2p_comm, config.grad_sync_func, config.finalize_model_grads_func = given


class Step:
    """Runs the weight gradients of a step when they are due."""

    def __init__(
        self,
        parts: list[list[list[Any]]],
        groups: list[list[Any]],
        schedule: Schedule,
        stage: int,
        before: np.ndarray,
        config: Any,
        measured: Measured,
    ) -> None:
        self._parts, self._groups, self._measured = parts, groups, measured
        ops = schedule.ops(stage).tolist()
        # `fill` cannot count backward passes without parts.
        seen = [(backward, chunk, i) for backward, chunk, i in ops if parts[chunk] or not backward]
        self._due = [int(before[int(backward), chunk, i]) for backward, chunk, i in seen]
        chunks = [chunk for backward, chunk, _ in seen if backward]
        self._order = [(chunk, part) for chunk in chunks for part in range(len(parts[chunk]))]
        self._due.append(len(self._order))
        # Index in `_order` at which the parts of a chunk's last backward pass begin.
        self._last = [
            len(self._order) - 1 - self._order[::-1].index((chunk, 0)) if each else 0
            for chunk, each in enumerate(parts)
        ]
        # Gradients must not start a reduction that upstream's schedule starts itself.
        self._starts_reduction = config.grad_sync_func is None or (len(parts) == 1 and stage == 0)
        self._reductions: dict[int, Callable[[], None]] = {}
        self._done, self._forwards = 0, 0
        self._ran = [0] * len(parts)

    def begin_forward(self) -> None:
        """Run what is due before a forward pass, then count the pass."""
        self.fill()
        self._forwards += 1

    def fill(self) -> None:
        """Run the weight gradients that are due before the next pass."""
        # Count backward passes by the queue of an attention or output layer: the queue of an expert may stay empty.
        backwards = sum(
            ran + parts[0][-1].wgrad_store.context.qsize()
            for ran, parts in zip(self._ran, self._parts, strict=True)
            if parts
        )
        self._run(self._due[self._forwards + backwards])

    def reduced_later(self, start: Any) -> Any:
        def later(chunk: int, original: Any, parameters: Any) -> None:
            self._reductions[chunk] = partial(original, parameters)
            self._reduce(chunk)

        if start is None:
            return None
        each = [partial(later, chunk, f) for chunk, f in enumerate(start if isinstance(start, list) else [start])]
        return each if isinstance(start, list) else each[0]

    def finished_before(self, finalize: Any) -> Any:
        def finalized(*args: Any, **kwargs: Any) -> Any:
            self._run(len(self._order))
            return finalize(*args, **kwargs)

        return finalized

    @torch.no_grad()  # upstream sets requires_grad on received tensors
    def _run(self, until: int) -> None:
        while self._done < until:
            chunk, part = self._order[self._done]
            last = self._done >= self._last[chunk] and self._starts_reduction
            with _ready(self._groups[chunk], last), self._measured():
                for module in self._parts[chunk][part]:
                    _run(module)
            self._done += 1
            self._ran[chunk] += part == 0
            self._reduce(chunk)

    def _reduce(self, chunk: int) -> None:
        if self._done >= self._last[chunk] + len(self._parts[chunk]) and chunk in self._reductions:
            self._reductions.pop(chunk)()


def _parts(chunk: Any) -> list[list[Any]]:
    """Return a chunk's deferring layers, as parts, in backward order."""
    layers = [*getattr(chunk.decoder, "layers", ())]
    if chunk.post_process:
        layers.append(chunk.output_layer)
    return [found for layer in reversed(layers) if (found := [m for m in reversed([*layer.modules()]) if _defers(m)])]


def _defers(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def _run(module: Any) -> None:
    for weight in _weights(module):
        # With fused accumulation, DDP still expects a gradient, and adds it for embeddings with shared weights.
        weight.grad = torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight)
    module.backward_dw()


def _weights(module: Any) -> list[torch.nn.Parameter]:
    return [weight for name, weight in module.named_parameters(recurse=False) if name.startswith("weight")]


@contextlib.contextmanager
def _ready(groups: list[Any], last: bool) -> Iterator[None]:
    """Inside, gradients count as ready for reduction if `last`, else not."""
    given = [group.is_last_microbatch for group in groups]
    for group in groups:
        group.is_last_microbatch = last
    try:
        yield
    finally:
        for group, value in zip(groups, given, strict=True):
            group.is_last_microbatch = value
