"""What a packing policy is: its settings, which make it for a job, and what it does in every step."""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from megatron_wlb.plan.types import Policy
from megatron_wlb.settings import Settings

if TYPE_CHECKING:
    from megatron_wlb.job import Job


class Packing(Settings):
    """Settings of a packing policy: a frozen dataclass in the policy's file, entered in `POLICIES` by its name."""

    __slots__ = ()
    name: ClassVar[str]
    """Value of `--wlb-packing`."""
    help: ClassVar[str]
    """What the policy does, for `--help` and the page of flags."""
    trains: ClassVar[bool] = True
    """False for a baseline that plans and benchmarks may have, and training has not."""
    keeps_order: ClassVar[bool] = False
    """Micro-batches keep their places, and documents theirs."""
    fixed_length: ClassVar[bool] = False
    """Micro-batches are one context window long, not up to S_max."""
    steady_tokens: ClassVar[bool] = False
    """Steps hold N * C tokens whatever M is, which may so be chosen for time alone (`--wlb-micro-batches auto`)."""

    def most_step_tokens(self, job: "Job") -> int | None:
        """Tokens that a step holds at most, whatever S_max is; None: as many as fit."""
        return job.batch_tokens if self.fixed_length else None

    @abstractmethod
    def policy(self, job: "Job") -> Policy:
        """The policy with nothing packed yet. Raises ValueError if it cannot pack this job."""
