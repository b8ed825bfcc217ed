"""Pre-train a GPT with Megatron-LM: upstream's flags, and `--wlb` for workload-balanced training."""

from megatron_wlb.adapter.pretrain import main

if __name__ == "__main__":
    main()
