"""`upstream_script` started by itself, its data and loss taken for upstream's; imports megatron first."""

import megatron.core  # noqa: F401, I001  (what would be hooked is hooked here)
from megatron_wlb.adapter import compat

if __name__ == "__main__":
    from tests.adapter import upstream_script

    compat.upstream().digests.clear()
    upstream_script.main()
