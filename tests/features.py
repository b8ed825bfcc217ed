"""Which files of the package name a feature in code."""

import ast
import re
from pathlib import Path

import megatron_wlb

PACKAGE = Path(megatron_wlb.__file__).parent
STAND_IN = "adapter/cpu/linear.py"
"""Kernels for a CPU, for tests alone."""
FEATURES = {
    "experts": ("num_experts|moe_router_topk|EXPERTS", 4),
    "latents": ("(?i)latent|kv_lora", 6),
    "MTP": ("(?i)mtp", 6),
    "sliding windows": ("(?i)windowed|window_size|window_of", 4),
    "linear layers": ("(?i)delta_?net|mamba|mixer|linear_?layer", 8),
    "conversations": ("(?i)conversation|(?<![a-z_])sft(?![a-z_])", 6),
    "closed batches": ("(?i)(?<![a-z])closed|plan_step", 4),
    "Bridge": ("(?i)(?<![a-z])bridge", 2),
    "old versions": ("(?i)legacy", 1),
    "delay": ("(?i)(?<![a-z])delay(s|ed)?(?![a-z_])", 3),
    "tiles": ("tp_tile|tp_overlap|tp_comm_overlap|tiled|tiling|user_buffers|USER_BUFFERS|Tiles$", 8),
    "recomputation": ("(?i)recompute", 7),
}
"""Names of a feature, and the most files that may have one."""


def files_that_name(pattern):
    """Files of the package in whose code a name matches; strings and comments do not count."""

    def names(path):
        for each in ast.walk(ast.parse(path.read_text())):
            words = [getattr(each, field, None) for field in ("id", "attr", "name", "module", "arg")]
            yield from (word for word in words if isinstance(word, str))

    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(map(re.compile(pattern).search, names(path)))
    }
