"""A LLaMA2-7B layer on one GPU: time of attention and of all else, and memory, beside their predictions.

    python -m benchmarks.gpu.layer [--tensor-parallel 8] [--quick] [--check]

The layer is a tensor-parallel rank's share, without collectives. Over the length of a single document (Figure 7 of the
paper): forward and backward of the layer and of its attention, memory that the layer keeps until backward, and the peak
of both. Last, the crossover: the length at which attention takes as long as all else. Predictions are of --profile.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks import results
from benchmarks.convergence_model import Layer, Shape, rotary_table
from benchmarks.gpu.bench import Bench, command_line
from benchmarks.lengths import WINDOW
from benchmarks.results import Row
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import MODELS
from megatron_wlb.runtime.attention import context_parallel_attention
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import shard
from megatron_wlb.simulate.memory import layer_bytes
from megatron_wlb.simulate.passes import pass_times

WITHIN = 0.15
"""Goal for the relative error of predictions, at lengths of half a window and more."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tensor-parallel", type=int, default=8, help="ranks that share the layer; default: 8")
    parser.add_argument("--profile", default="h100-fa2", help="of the predictions; default: %(default)s")
    bench = Bench("layer", parser.parse_args())
    quick, tp = bench.args.quick, bench.args.tensor_parallel
    model = replace(MODELS["llama2-7b"], num_layers=1)
    if quick:
        heads = {"num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 32}
        model = replace(model, hidden_size=256, ffn_hidden_size=512, **heads)
    job = make_job(
        model=model,
        context_length=512 if quick else WINDOW,
        global_batch_size=1,
        parallel=Parallel(tp=tp, sequence_parallel=False),
        profile=load_profile(bench.args.profile),
    )
    bench.settings |= {"tensor_parallel": tp, "profile": job.profile.name, "window": job.context_length}
    lengths = [job.context_length >> i for i in range(4 if quick else 8)][::-1]
    for length in lengths:
        with bench.case(document_length=length):
            bench.add({"document_length": length, **measure(bench, job, length), **predict(job, length)})
    done = [row for row in bench.rows if "failed" not in row]
    if len(done) > 1:
        tokens = bench.settings["crossover_tokens"] = crossover(done)
        bench.say(f"attention takes as long as all else at {tokens} tokens")
    for row in (row for row in done if not quick and row["document_length"] * 2 >= job.context_length):
        for key in [key.removeprefix("predicted_") for key in row if key.startswith("predicted_")]:
            if row[key] is not None:
                name = f"{row['document_length']} tokens, {key}: error of the prediction"
                bench.goals.append(results.at_most(name, abs(row[f"predicted_{key}"] / row[key] - 1), WITHIN))
    bench.write()
    bench.conclude()


def measure(bench: Bench, job: Job, length: int) -> Row:
    """Times and memory of the layer on a document of `length` tokens."""
    model, tp = job.model, job.parallel.tp
    _, plan = shard(np.array([length]), job)
    metadata = ShardMetadata.build(plan, 0, bench.options.backend.encode).to(bench.device)
    sizes = {"hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size}
    shape = Shape(num_layers=1, num_heads=model.num_attention_heads, vocab_size=0, **sizes)
    layer = Layer(shape, bench.options, tp).to(bench.device, bench.dtype)
    x = bench.random(length, model.hidden_size).requires_grad_()
    cos, sin = rotary_table(length, model.head_size).to(bench.device, bench.dtype)[:, :, None]
    q, k, v = (bench.random(length, model.num_attention_heads // tp, model.head_size).requires_grad_() for _ in "qkv")
    calls = {
        "layer": (partial(layer, x, cos, sin, metadata), [x, *layer.parameters()]),
        "attention": (partial(context_parallel_attention, q, k, v, metadata, None, bench.options), [q, k, v]),
    }
    row: Row = {}
    for name, (forward, inputs) in calls.items():
        out = forward()
        backward = partial(torch.autograd.grad, inputs=inputs, grad_outputs=torch.ones_like(out))
        row |= bench.timed(f"{name}_forward", forward)
        row |= bench.timed(f"{name}_backward", partial(backward, out, retain_graph=True))
        del out
        row |= {f"{name}_{key}": value for key, value in bench.memory(forward, backward).items()}
    return row


def predict(job: Job, length: int) -> Row:
    """The cost model's times without tensor-parallel communication, and the memory that the layer keeps."""
    _, plan = shard(np.array([length]), job)
    row: Row = {"predicted_layer_kept_mib": layer_bytes(job) * length / 2**20}
    for direction, times in zip(("forward", "backward"), pass_times(job, [plan]).layers, strict=True):
        row[f"predicted_layer_{direction}_ms"] = float((times.total - times.tensor)[0]) / 1e3
        row[f"predicted_attention_{direction}_ms"] = float(times.attention[0, 0]) / 1e3
    return row


def crossover(rows: list[Row]) -> int:
    """Length at which attention takes as long as all else: where the logarithm of their ratio crosses 0.

    Beyond the measured lengths the ratio goes on as at the end.
    """

    def both(name: str) -> np.ndarray:
        return np.array([row[f"{name}_forward_ms"] + row[f"{name}_backward_ms"] for row in rows])

    x = np.log([row["document_length"] for row in rows])
    y = np.log(both("attention") / np.maximum(both("layer") - both("attention"), 1e-9))
    above = np.flatnonzero(y >= 0)
    i = min(max(1, int(above[0]) if len(above) else len(x) - 1), len(x) - 1)
    slope = max((y[i] - y[i - 1]) / (x[i] - x[i - 1]), 0.1)  # noise on small sizes, which never cross
    return round(float(np.clip(np.exp(x[i] - y[i] / slope), 1, 1 << 30)))


if __name__ == "__main__":
    main()
