"""Calls upstream as its pretrain_gpt.py does in every version, with data and a forward step that --wlb must replace."""

import functools

from megatron.core import package_info
from megatron.core.enums import ModelType
from megatron.training import arguments, pretrain

MINOR = int(package_info.__version__.split(".")[1])
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


def own_provider(*args, **kwargs):
    raise RuntimeError("the script's own data")


def own_step(*args, **kwargs):
    raise RuntimeError("the script's own forward step")


def gpt_builder(*args, **kwargs):
    raise RuntimeError("the script's own model")


def model_provider(builder, *args, **kwargs):
    return builder(*args, **kwargs)


def main():
    model = functools.partial(model_provider, gpt_builder)
    if MINOR < 18:
        pretrain(own_provider, model, ModelType.encoder_or_decoder, own_step, args_defaults=DEFAULTS)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(args_defaults=DEFAULTS)
    if MINOR < 19:
        config = pretrain_cfg_container_from_args(args)
        pretrain(config, own_provider, model, ModelType.encoder_or_decoder, own_step)
        return
    from megatron.training.argument_utils import gpt_config_from_args

    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, own_provider, ModelType.encoder_or_decoder, own_step)


if __name__ == "__main__":
    main()
