"""Label-smoothed cross-entropy together with the output projection.

On a CPU the softmax over the vocabulary costs as much as the rest of a small model, most of it memory
traffic: PyTorch's own loss walks over [tokens, vocabulary] about eight times. Here the rows go through in
chunks that stay in the cache, and the gradient, which has a closed form, replaces the logits in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 256  # rows; 256 x 8,000 float32 logits are 8 MB


class Sums(NamedTuple):
    """Over all rows: `smoothed` is what training minimises, `nll` what is reported."""

    smoothed: Tensor
    nll: Tensor


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        wants_gradient = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_weight = torch.zeros_like(weight) if wants_gradient else None
        grad_bias = torch.zeros_like(bias) if wants_gradient and bias is not None else None
        smoothed, nll = hidden.new_zeros(()), hidden.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            rows, gold = hidden[start : start + CHUNK], labels[start : start + CHUNK, None]
            logits = rows @ weight.T if bias is None else torch.addmm(bias, rows, weight.T)
            normaliser = logits.logsumexp(1, keepdim=True)
            chosen = (normaliser - logits.gather(1, gold)).sum()
            spread = normaliser.sum() - logits.mean(1).sum()
            nll += chosen
            smoothed += (1 - smoothing) * chosen + smoothing * spread
            if grad_hidden is None or grad_weight is None:
                continue
            # d loss / d logits = softmax - ((1 - smoothing) * one_hot + smoothing / vocabulary)
            grad = logits.sub_(normaliser).exp_().sub_(smoothing / logits.shape[1])
            grad.scatter_add_(1, gold, torch.full_like(gold, smoothing - 1, dtype=grad.dtype))
            torch.mm(grad, weight, out=grad_hidden[start : start + CHUNK])
            grad_weight.addmm_(grad.T, rows)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g.mul_(upstream[0]) for g in ctx.gradients]
        return (*scaled, None, None)


def projected_loss(hidden: Tensor, output: torch.nn.Linear, labels: Tensor, smoothing: float) -> Sums:
    """hidden [N, d], labels [N] -> summed losses. Only one backward pass is possible."""
    sums = _ProjectedLoss.apply(hidden, output.weight, output.bias, labels, smoothing)  # type: ignore[no-untyped-call]
    return Sums(*sums)
