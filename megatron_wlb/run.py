"""Runs an unmodified `pretrain_gpt.py` of a Megatron-LM checkout with `--wlb`.

torchrun ... -m megatron_wlb.run PATH/pretrain_gpt.py FLAGS
"""

import os
import runpy
import sys

from megatron_wlb.adapter.script import install, one_line


def main() -> None:
    """Run the script of the command line as Python would, after `script.install`."""
    sys.argv[0] = "megatron_wlb.run"
    with one_line():
        if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
            what = f"{sys.argv[1]} is not a file" if len(sys.argv) > 1 else "there is no script"
            raise ValueError(f"{what}; give the path of pretrain_gpt.py in a Megatron-LM checkout, then its flags")
    del sys.argv[0]
    # The checkout's own megatron comes first, as when the script is run without us.
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
