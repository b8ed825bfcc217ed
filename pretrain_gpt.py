"""Pre-train a GPT by upstream's flags and `--wlb`, without a checkout of Megatron-LM."""

from megatron_wlb.adapter.script import main

if __name__ == "__main__":
    main()
