"""What the planning tests share: both packing cores."""

import pytest

from megatron_wlb.plan import native


@pytest.fixture(params=["python", "native"])
def use_native(request: pytest.FixtureRequest) -> bool:
    """Both packing cores. Without the native one the suite fails: a skip would hide a broken build."""
    if request.param == "native" and not native.AVAILABLE:
        pytest.fail("the native core is not built; run scripts/setup.sh")
    return request.param == "native"
