"""Packed micro-batches in upstream's combined schedule (`--overlap-moe-expert-parallel-comm`).

It runs the layers of a micro-batch's forward pass and of another's backward pass by turns, each in nodes:
attention and router, dispatch, experts, combine. Nodes call parts of a layer, not the layer, so the work of upstream
and this plugin around a layer's forward pass is done here. No node takes the two micro-batches for equally long.
"""

import contextlib
import importlib
import inspect
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_attr_wrapped_model

from megatron_wlb.adapter.clock import Clock
from megatron_wlb.adapter.layers.kind import Kind, Run
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.versions import upstream
from megatron_wlb.runtime.attention import send_ahead


class _Running:
    """Values that the running node needs, and upstream does not pass to it."""

    padding: Any = None
    """For the router: the mask of its micro-batch."""


@contextlib.contextmanager
def _installed(clock: Clock) -> Iterator[None]:
    """Serve packed micro-batches inside, timed by `clock`."""
    callables, nodes = (importlib.import_module(name) for name in upstream().nodes)
    running = _Running()

    def built(original: Any) -> Any:
        def build_transformer_layer_callables(layer: Any) -> Any:
            """Return the functions of a layer's nodes in one micro-batch."""
            (attend, dispatch, compute, *others), weights = original(layer)
            attention: Any = None

            def attended(node: Any, hidden: Any) -> Any:
                nonlocal attention
                running.padding = node.chunk_state.padding_mask
                routed = attend(node, hidden)
                running.padding = None
                # Bound now: the next micro-batch replaces it before this one's backward pass.
                attention = getattr(getattr(layer.self_attention, "core_attention", None), "last", None)
                return routed

            def computed(node: Any, *inputs: Any) -> Any:
                """Prefetch the first K and V as the backward of experts begins.

                Combine begins earlier, on the communication stream, whose memory is not attention's.
                """
                output = compute(node, *inputs)
                if (last := attention) is not None:
                    output.register_hook(lambda gradient: send_ahead(last()))
                return output

            return [attended, dispatch, computed, *others], weights

        return build_transformer_layer_callables

    def routed(original: Any) -> Any:
        def route(self: Any, hidden_states: Any, padding_mask: Any = None) -> Any:
            if running.padding is not None:
                padding_mask = running.padding.transpose(0, 1).bool()  # as a layer's forward pass does
            return original(self, hidden_states, padding_mask)

        return route

    def combined(original: Any) -> Any:
        bind = inspect.signature(original).bind

        def combined_forward_backward_step(*args: Any, **given: Any) -> Any:
            named = bind(*args, **given).arguments
            models = {"forward": named["f_model"], "backward": named["b_model"]}
            with clock.passes(*(way for way, model in models.items() if model is not None)):
                done = original(*args, **given)
            if models["forward"] is not None:  # as after `Training.forward_step`, but now the plan has run
                get_attr_wrapped_model(models["forward"], "set_input_tensor")(None)
            return done

        return combined_forward_backward_step

    forward, backward = clock.span("forward"), clock.span("backward")
    with (
        replaced(callables, "build_transformer_layer_callables", built, ("layer",)),
        replaced(MoELayer, "route", routed, ("hidden_states", "padding_mask")),
        replaced(combined_1f1b, "combined_forward_backward_step", combined, ("f_model", "b_model")),
        replaced(ScheduleNode, "forward", forward, ()),
        replaced(ScheduleNode, "backward", backward, ()),
        replaced(nodes.TransformerLayerNode, "backward_dw", backward, ()),
    ):
        yield


class _Overlap(Kind):
    def applies(self, args: Namespace) -> bool:
        return bool(args.overlap_moe_expert_parallel_comm)

    def installed(self, run: Run) -> contextlib.AbstractContextManager[None]:
        return _installed(run.clock)


KIND = _Overlap()
