"""Going on from a checkpoint: the state of the packer, and what the run before had another of."""

from argparse import Namespace

from megatron.training import print_rank_0

from megatron_wlb.adapter import checkpoint
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan.packer import Packer

RunLayout = dict[str, int | str]


def run_layout(args: Namespace, config: WlbConfig, *, max_tokens: int, crossover: int) -> RunLayout:
    """What a run may resume with another of, by the name that is printed."""
    return {
        "TP": args.tensor_model_parallel_size,
        "CP": args.context_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "VPP": args.virtual_pipeline_model_parallel_size or 1,
        "EP": args.expert_model_parallel_size,
        "DP": args.data_parallel_size,
        "global batch size": args.global_batch_size,
        "S_max": max_tokens,
        "crossover": crossover,
        "CP sharding": config.cp_sharding,
        **packing_settings(args, config),
    }


def packing_settings(args: Namespace, config: WlbConfig) -> RunLayout:
    """Settings of the packing policy that runs."""
    settings: dict[str, RunLayout] = {
        "wlb": {"thresholds": ",".join(map(str, config.thresholds_for(args.seq_length)))},
        "adaptive": {"mode": config.packing_mode, "delay at most": config.max_delay_steps},
        "fixed": {"global batches": config.global_batches},
    }
    return settings.get(config.packing, {})


def resume(packer: Packer, args: Namespace, config: WlbConfig, first_step: int, layout: RunLayout) -> bool:
    """Bring a new packer to `first_step`; returns whether the data begins anew there (`--wlb-restart-packing`).

    Prints what is different from the run before. Raises ValueError for a state that is missing or does not fit.
    """
    if first_step == 0:
        return False
    try:
        state, before = checkpoint.load_state(args.load, first_step)
        if state.get("step") != first_step:
            raise ValueError(
                f"the packer state is of step {state.get('step')}, not of iteration {first_step}; copy that one's"
            )
        packer.load_state(state)
    except ValueError as error:
        if not config.restart_packing:
            raise ValueError(f"{error}; or begin with the data anew by --wlb-restart-packing") from error
        packer.begin_at(first_step)
        print_rank_0(f"> wlb: WARNING: the data begins anew at iteration {first_step}: {error}")
        return True
    before = before or {"global batch size": state["num_micro_batches"]}  # all that earlier releases saved
    changes = [f"{name} {before[name]} -> {now}" for name, now in layout.items() if before.get(name, now) != now]
    waiting = sum(len(rows) for rows in state["waiting"].values())
    print_rank_0(
        f"> wlb: resumed at iteration {first_step} with {waiting} documents waiting; "
        + (f"changed: {', '.join(changes)}" if changes else "nothing changed")
    )
    return False
