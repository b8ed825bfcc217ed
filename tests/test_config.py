"""S_max: the user's, the default's and what memory has room for."""

import pytest

from megatron_wlb.config import MAX_TOKENS, WlbConfig


def test_s_max_without_a_limit_of_memory():
    assert WlbConfig().max_tokens_for(1000, 16) == 1264
    assert WlbConfig(max_tokens=1600).max_tokens_for(1000, 16) == 1600
    with pytest.raises(ValueError, match="auto needs to know the memory: give --wlb-memory-budget"):
        WlbConfig(max_tokens="auto").max_tokens_for(1000, 16)


def test_s_max_that_memory_limits():
    assert WlbConfig(max_tokens="auto").max_tokens_for(1000, 16, fitting=4000) == 4000
    assert WlbConfig(max_tokens="auto").max_tokens_for(1000, 48, fitting=1 << 40) == MAX_TOKENS // 48 * 48
    assert WlbConfig(max_tokens=4000).max_tokens_for(1000, 16, fitting=4000) == 4000
    with pytest.raises(ValueError, match="of 4016 tokens .* give --wlb-max-tokens 4000 or auto"):
        WlbConfig(max_tokens=4016).max_tokens_for(1000, 16, fitting=4000)
    with pytest.raises(ValueError, match="of 1264 tokens .* give --wlb-max-tokens 1200 or auto"):
        WlbConfig().max_tokens_for(1000, 16, fitting=1200)
    for config in (WlbConfig(), WlbConfig(max_tokens="auto"), WlbConfig(max_tokens=1008)):
        with pytest.raises(ValueError, match="at most 992 tokens fit into memory, less than --seq-length 1000"):
            config.max_tokens_for(1000, 16, fitting=992)
