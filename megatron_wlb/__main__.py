"""`python -m megatron_wlb`: the `megatron-wlb` command."""

import sys

from megatron_wlb.cli.main import main

sys.exit(main())
