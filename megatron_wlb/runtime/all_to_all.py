"""Exchange of K and V, or of latents, and of gradients between CP ranks.

A *pool* holds the rows that arrive, then the rank's own rows; keys are gathered from it in the order of a round.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wlb.documents import Keys
from megatron_wlb.runtime.backends.protocol import Spans, keys_and_values
from megatron_wlb.runtime.metadata import Round, ShardMetadata
from megatron_wlb.runtime.spans import span

_all_to_all = dist.all_to_all_single


def exchange_rows(x: Tensor, metadata: ShardMetadata, group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of x [s, ...] that local queries see, [P, ...].

    x is anything that K and V are computed from row by row, for `attention_to_keys`; differentiable once. Takes an
    all-to-all in forward and one in backward. Gradients return in the dtype of x and are summed in fp32 (fp64 for
    fp64). Raises ValueError for a plan with documents in shares.
    """
    rounds = rounds_at_once(metadata)
    return x if all(round_.keys_are_rows for round_ in rounds) else _ExchangeRows.apply(x, rounds, group)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounds: Sequence[Round], group: dist.ProcessGroup | None) -> Tensor:
        ctx.setup = rounds, group
        return torch.cat([wait(*start(x[round_.rows], round_, group), round_) for round_ in rounds])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rounds, group = ctx.setup
        each = zip(split_keys(gradient, rounds), rounds, strict=True)
        return torch.cat([_returned(of_keys, round_, group) for of_keys, round_ in each]), None, None


def _returned(gradient: Tensor, round_: Round, group: dist.ProcessGroup | None) -> Tensor:
    """Return the gradient of a round's rows from the gradient of its keys."""
    total = gradient.index_select(0, round_.own_keys).to(torch.promote_types(gradient.dtype, torch.float32))
    if round_.sent:
        given = gradient.index_select(0, round_.arrived_keys)
        back = given.new_empty((round_.sent_rows.shape[0], *given.shape[1:]))
        _wait(_exchanged(given, back, round_, group, back=True))
        total.index_add_(0, round_.sent_rows, back.to(total.dtype))
    return total.to(gradient.dtype)


def start(kv: Tensor, round_: Round, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """Return the pool of kv [n, ...], and the collective that receives into it."""
    if not round_.sent:
        return kv, None
    own, arrived = kv[round_.own_rows], round_.arrived_keys.shape[0]
    pool = kv.new_empty((arrived + own.shape[0], *kv.shape[1:]))
    pool[arrived:] = own
    return pool, _exchanged(pool[:arrived], kv.index_select(0, round_.sent_rows), round_, group)


def wait(pool: Tensor, work: dist.Work | None, round_: Round) -> Tensor:
    if work is not None:
        _wait(work)
    return pool if round_.keys_are_rows else pool.index_select(0, round_.gather)


def seen_sums(
    x: Tensor, metadata: ShardMetadata, spans: Spans, window: int | None, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the sum of x, int64 [s], over the keys that each local row sees in layers of this window, int64 [s].

    The keys are those that arrive, as K and V do, and tables tell which of them a row sees. Sums wrap around.
    """
    total = torch.zeros_like(x)
    for round_ in metadata.rounds_of(window):
        keys = wait(*start(x[round_.rows], round_, group), round_)
        sums = torch.nn.functional.pad(keys.cumsum(0), (1, 0))
        for call, table in zip(round_.calls, round_.tables, strict=True):
            rows = torch.arange(call.rows.stop - call.rows.start, dtype=table.dtype, device=table.device)
            ends, first, stop = spans(table)
            entry = torch.searchsorted(ends, rows, right=True)
            begins = first[entry]
            stops = (stop - ends + 1)[entry] + rows if round_.causal else stop[entry]  # aligned to the bottom right
            if round_.causal and window is not None:
                begins = torch.maximum(begins, stops - 1 - window)
            total[round_.rows][call.rows].add_(sums[stops] - sums[begins])
    return total


class GradientSum:
    """Sums dK and dV over the rounds of their rows."""

    def __init__(self, dk: Tensor, dv: Tensor) -> None:
        """Write dk [n, Hkv, D] and dv [n, Hkv, Dv] once `left` rounds are done."""
        self._into, self.left = (dk, dv), 0
        self._total: Tensor | None = None

    def add(self, values: Tensor, rows: slice) -> None:
        """Add gradients of `rows` (`side_by_side`); takes over `values`."""
        num_rows = self._into[0].shape[0]
        if self._total is None and values.shape[0] == num_rows:
            self._total = values
            return
        if self._total is None:
            self._total = values.new_zeros((num_rows, *values.shape[1:]))
        self._total[rows] += values

    def done(self, back: Tensor | None, rows: Tensor) -> None:
        """Add gradients that came `back` to `rows`; after the last round, write the sums."""
        assert self._total is not None
        if back is not None:
            self._total.index_add_(0, rows, back.to(self._total.dtype))
        self.left -= 1
        if not self.left:
            for local, values in zip(self._into, keys_and_values(self._total, self._into[0].shape[-1]), strict=True):
                local.copy_(values)


class GradientExchange:
    """Sends dK and dV of a round to the ranks that hold the rows."""

    def __init__(
        self, dkv: Tensor, total: GradientSum, round_: Round, group: dist.ProcessGroup | None, dtype: torch.dtype | None
    ) -> None:
        """`dkv`: result of `attend_backward`; sent in `dtype`, by default its own."""
        self._total, self._rows, self._back = total, round_.sent_rows, None
        total.add(dkv if round_.keys_are_rows else dkv.index_select(0, round_.own_keys), round_.own_rows)
        if round_.sent:
            self._given = dkv.to(dtype or dkv.dtype).index_select(0, round_.arrived_keys)
            self._back = self._given.new_empty((round_.sent_rows.shape[0], *dkv.shape[1:]))
            self._work = _exchanged(self._given, self._back, round_, group, back=True)

    def arrive(self) -> None:
        """Wait for the gradients from other ranks, and add them."""
        if self._back is not None:
            _wait(self._work)
        self._total.done(self._back, self._rows)


def _exchanged(
    arriving: Tensor, leaving: Tensor, round_: Round, group: dist.ProcessGroup | None, back: bool = False
) -> dist.Work:
    """Start sending `leaving` to its readers; `back`: `arriving` to its source."""
    received, sent = (arriving, list(round_.received)), (leaving, list(round_.sent))
    (into, into_sizes), (given, sizes) = (sent, received) if back else (received, sent)
    return _all_to_all(into, given, into_sizes, sizes, group=group, async_op=True)


def _wait(work: dist.Work) -> None:
    with span("exchange"):
        work.wait()


@functools.cache
def gradient_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a second group of the group's ranks, with its timeout and NCCL options; all of them must call.

    NCCL runs a group's collectives in order: gradients, which leave once a round has been computed, would delay K and V
    of the next but one round and, with `CUDA_DEVICE_MAX_CONNECTIONS=1`, the attention between them.
    """
    backends = (group._get_backend(device) for device in group._device_types)
    options = next((backend.options for backend in backends if backend.options), None)  # a fake group has none
    given: dict[str, Any] = {"timeout": options._timeout} if options else {}
    if dist.is_nccl_available() and isinstance(options, dist.ProcessGroupNCCL.Options):
        # A copy, since a group writes its name and ranks into its options.
        copied = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.is_high_priority_stream)
        copied.config, copied._timeout = options.config, options._timeout
        given["pg_options"] = copied
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True, **given)


def rounds_at_once(metadata: ShardMetadata) -> tuple[Round, ...]:
    """Return the rounds if their keys, one round's after the other's, are all that local queries see."""
    if any(layout.of not in (Keys.ALL, Keys.WHOLE, Keys.SHARED) for layout in metadata.layouts):
        raise ValueError(
            f"a plan of {len(metadata.layouts)} rounds, and all keys are there at once; plan for a job whose "
            "cp_exchange is latents"
        )
    return metadata.rounds


def split_keys(x: Tensor, rounds: Sequence[Round]) -> tuple[Tensor, ...]:
    """Return x [P, ...] of all keys round by round, as views."""
    return x.split([round_.gather.shape[0] for round_ in rounds])
