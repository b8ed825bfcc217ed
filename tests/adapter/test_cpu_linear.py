"""The kernel of Mamba layers on the CPU against its definition, one row after the other."""

import torch
from torch.nn.functional import silu, softplus

from megatron_wlb.adapter.cpu.linear import mamba_split_conv1d_scan_combined

HEADS, SIZE, GROUPS, STATE, TAPS = 4, 8, 2, 6, 4
LENGTHS = (20, 1, 29)


def test_mamba_equals_its_recurrence():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inner, channels = HEADS * SIZE, HEADS * SIZE + 2 * GROUPS * STATE
    given = random(1, sum(LENGTHS), inner + channels + HEADS)
    weight, bias, dt_bias, skip = random(channels, TAPS), random(channels), random(HEADS), random(HEADS)
    decay = -random(HEADS).exp()
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    out = mamba_split_conv1d_scan_combined(
        given, weight, bias, dt_bias, decay, skip, 8, documents, headdim=SIZE, ngroups=GROUPS
    )
    wanted = []
    for rows in given[0].split(LENGTHS):
        z, xbc, dt = rows.split((inner, channels, HEADS), dim=1)
        before, state = torch.cat((xbc.new_zeros(TAPS - 1, channels), xbc)), xbc.new_zeros(HEADS, SIZE, STATE)
        for i, step in enumerate(softplus(dt + dt_bias)):
            mixed = silu((before[i : i + TAPS] * weight.T).sum(0) + bias)
            x, b, c = mixed.split((inner, GROUPS * STATE, GROUPS * STATE))
            b, c = (each.view(GROUPS, STATE).repeat_interleave(HEADS // GROUPS, dim=0) for each in (b, c))
            x = x.view(HEADS, SIZE)
            state = (step * decay).exp()[:, None, None] * state + (step[:, None] * x)[:, :, None] * b[:, None]
            wanted.append((torch.einsum("hpn,hn->hp", state, c) + skip[:, None] * x).flatten() * silu(z[i]))
    torch.testing.assert_close(out[0], torch.stack(wanted), rtol=1e-9, atol=1e-9)
