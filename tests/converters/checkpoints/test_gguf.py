"""GGUF files, quantised or not, are the model and the tokenizer that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from beamline.converters.families import converter_for
from beamline.converters.modules.transformer.steps import DecoderOnlySteps
from tests.converters.test_unsupported import reasons_of
from tests.support.gguf_files import write_gguf
from tests.support.language_models import CHAT_TEMPLATE, EOS, POSITIONS, SPECIAL, VOCABULARY, LanguageShape

# Widths of 32 and its multiples: that is what 8-bit blocks take.
SHAPE = LanguageShape("llama", "gguf", {"intermediate_size": 64})


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "8 bits"])
@torch.no_grad()
def test_a_gguf_file_is_the_model_that_it_was_made_from(tmp_path: Path, quantised: bool) -> None:
    original = SHAPE.original()
    loaded = converter_for(write_gguf(tmp_path / "model.gguf", original, quantised=quantised)).load()
    tokens = torch.randint(3, VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(0))
    expected = original(input_ids=tokens).logits
    # The quantised one is close to what it was made from, and exactly what transformers makes of it.
    found = loaded.original(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.5 if quantised else 1e-4)
    assert quantised == bool((found - expected).abs().max() > 1e-3)
    torch.testing.assert_close(cast(DecoderOnlySteps, loaded.model).score(tokens), found, rtol=0, atol=1e-4)
    assert loaded.vocabulary.eos_ids == (EOS,)
    assert loaded.limits.max_target_length == POSITIONS
    assert (loaded.chat.template, loaded.chat.bos_token) == (CHAT_TEMPLATE, SPECIAL[0])
    text = "Hello, wörld: 123 times."
    assert loaded.source_tokenizer.decode(loaded.source_tokenizer.encode(text)) == text


def test_what_transformers_would_not_read_is_refused(tmp_path: Path) -> None:
    (reason,) = reasons_of(write_gguf(tmp_path / "model.gguf", SHAPE.original(), quantised=False, scaled=True))
    assert reason.startswith("llama.rope.scaling.type is 'yarn', which transformers does not read")
