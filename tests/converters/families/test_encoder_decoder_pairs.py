"""What only an `EncoderDecoderModel` has: two vocabularies, shared weights, and halves of many kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamline.converters.families import converter_for
from beamline.serving.errors import UnsupportedCheckpoint
from tests.converters.test_unsupported import reasons_of
from tests.support.encoder_decoder_pairs import BERT2BERT, BERT2GPT2, ROBERTA_SHARED
from tests.support.seq2seq import write_seq2seq


def test_two_vocabularies_need_two_tokenizers(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, BERT2GPT2)
    loaded = converter_for(folder).load()
    assert loaded.source_tokenizer.encode("Save it.") != loaded.target_tokenizer.encode("Save it.")
    assert loaded.target_tokenizer.decode(loaded.target_tokenizer.encode("Save it.")) == "Save it."
    shutil.rmtree(folder / "decoder")
    with pytest.raises(UnsupportedCheckpoint, match="have two vocabularies: save the decoder's tokenizer in"):
        converter_for(folder).load()


@torch.no_grad()
def test_shared_weights_are_stored_once(tmp_path: Path) -> None:
    """Older versions of transformers wrote them so; the present one would leave the decoder with random ones."""
    folder = write_seq2seq(tmp_path, ROBERTA_SHARED)
    weights = load_file(folder / "model.safetensors")
    own = "decoder.roberta."
    dropped = [name for name in weights if name.startswith(own) and f"encoder.{name.removeprefix(own)}" in weights]
    assert len(dropped) > 20
    save_file({name: each for name, each in weights.items() if name not in dropped}, folder / "model.safetensors")
    source = torch.arange(4, 20)[None]
    inputs = (source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[0, 5, 6]]))
    expected = ROBERTA_SHARED.original()(input_ids=source, decoder_input_ids=inputs[2]).logits
    torch.testing.assert_close(converter_for(folder).load().original(*inputs), expected)


def test_every_reason_is_said(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, BERT2BERT)
    content = json.loads((folder / "config.json").read_text())
    content["encoder"]["model_type"] = "distilbert"
    content["decoder"] |= {"hidden_act": "tanh", "is_decoder": False, "add_cross_attention": False}
    (folder / "config.json").write_text(json.dumps(content))
    encoder, activation, causal, cross = reasons_of(folder)
    assert encoder == "its encoder is 'distilbert'; supported: bert, roberta, xlm-roberta, camembert"
    assert activation.startswith("decoder: hidden_act is 'tanh'; supported: ")
    assert causal == "decoder: is_decoder is off: it would see the words that it has yet to write"
    assert cross == "decoder: add_cross_attention is off: it would not see the source"
