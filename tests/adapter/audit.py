"""The audit of a run in tests: by its document log, and what waits in its last checkpoint."""

import numpy as np

from megatron_wlb.adapter.plans import state_path
from megatron_wlb.plan import document_log, state
from megatron_wlb.plan.dataset import read_index, trained_tokens


def audit(log, checkpoint, iteration, prefixes=()):
    """With the datasets of the run, also whether every document was trained to its end."""
    packer, _ = state.load(state_path(str(checkpoint), iteration))
    waiting = np.concatenate(list(state.waiting(packer).values()))
    lengths = [trained_tokens(read_index(prefix).tokens) for prefix in prefixes] or None
    return document_log.audit(document_log.read(log), waiting, packer["stream"]["position"], lengths)
