"""Questions answered by a model's `generate`, the same for transformers and for Optimum."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.peers.protocol import Question


def answering(model: Any) -> Callable[[Question], dict[str, Any]]:
    def answer(question: Question) -> dict[str, Any]:
        began = time.perf_counter()
        source = torch.tensor(question.source)
        with torch.inference_mode():
            found = model.generate(
                input_ids=source,
                attention_mask=torch.ones_like(source),
                num_beams=question.beam,
                do_sample=False,
                max_length=question.target_length + 1,
            )
        tokens = found[:, 1:].tolist()  # without the start token
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return answer
