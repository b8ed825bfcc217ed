"""slime 624b824a: its schedule of micro-batches."""

import contextlib
from functools import partial
from itertools import chain
from typing import Any

from megatron_wlb.job import Job
from megatron_wlb.loops.patch import divided, replaced


def balanced(job: Job) -> contextlib.ExitStack:
    """Balance slime's steps by the job's work, in the process of its rollout manager.

    All ranks get as many micro-batches as their pipelines are predicted to need least time for, in the order of the
    plan. Which rollouts a step trains stays slime's. The job's ranks of data and context parallelism, and its virtual
    stages, are slime's. Raises RuntimeError if slime's function is another.
    """

    def make(original: Any) -> Any:
        def build_dp_schedule(
            args: Any,
            train_parallel_config: dict[str, int],
            total_lengths: list[int],
            *,
            global_batch_size: int,
            rollout_indices: list[int],
        ) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
            given = train_parallel_config
            samples: dict[int, list[int]] = {}
            if not args.use_dynamic_batch_size:
                raise ValueError("use_dynamic_batch_size is off, so micro-batches have a fixed size; switch it on")
            plan = partial(
                divided,
                job=job,
                max_tokens=args.max_tokens_per_gpu * given["cp_size"],
                dp=given["dp_size"],
                cp=given["cp_size"],
                vpp=given["vpp_size"],
                group_size=given["microbatch_group_size_per_vp_stage"],
            )
            for sample, rollout in enumerate(rollout_indices):
                samples.setdefault(rollout, []).append(sample)
            rollouts, steps = list(samples.values()), len(samples) // global_batch_size
            if not steps:
                raise ValueError(
                    f"{len(rollouts)} rollouts are less than a step's {global_batch_size} (global_batch_size); "
                    "give more rollouts, or a smaller step"
                )
            ranks: list[list[int]] = [[] for _ in range(given["dp_size"])]
            places: list[list[list[int]]] = [[] for _ in ranks]
            counts = []
            for step in range(steps):
                begin = step * global_batch_size
                own = list(chain.from_iterable(rollouts[begin : begin + global_batch_size]))
                planned = plan([total_lengths[i] for i in own])
                counts.append(len(planned[0]))
                if not all(all(rank) for rank in planned):
                    raise ValueError(
                        f"step {step} has {len(own)} samples for {len(planned) * counts[-1]} micro-batches; give more "
                        "samples, or fewer data-parallel ranks"
                    )
                for mine, found, rank in zip(ranks, places, planned, strict=True):
                    for rows in rank:
                        found.append(list(range(len(mine), len(mine) + len(rows))))
                        mine += [own[i] for i in rows]
            return ranks, places, counts, [global_batch_size] * steps

        return build_dp_schedule

    parameters = "args train_parallel_config total_lengths global_batch_size rollout_indices"
    return replaced("slime.utils.dp_schedule", "build_dp_schedule", parameters, make)
