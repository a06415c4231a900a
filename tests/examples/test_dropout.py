"""The recipe's own dropout, by what nn.Dropout promises."""

from __future__ import annotations

import torch
from torch import nn

from examples.translation.dropout import ByteDropout, use_byte_dropout


def test_elements_are_dropped_at_the_rate_and_the_mean_stays() -> None:
    torch.manual_seed(1)
    x = torch.ones(1000, 1000, requires_grad=True)
    out = ByteDropout(0.1)(x)
    dropped = (out == 0).float().mean().item()
    assert abs(dropped - 26 / 256) < 1e-3
    assert abs(out.mean().item() - 1) < 1e-3
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.bool(), out.bool()), "what was dropped has no gradient"


def test_what_is_drawn_follows_pytorchs_seed() -> None:
    dropout, x = ByteDropout(0.5), torch.ones(64, 64)
    torch.manual_seed(7)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(7)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.9)))
    use_byte_dropout(model)
    assert isinstance(model[1][0], ByteDropout)  # type: ignore[index]
    x = torch.rand(3, 4)
    assert torch.equal(model.eval()(x), model[0](x))
