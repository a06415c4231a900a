"""A small Marian-shaped model with random weights whose outputs vary and end by themselves, on both sides: as Hugging
Face runs it, and exported for our engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import MarianConfig, MarianMTModel

from beamline.converters.export import export_graphs
from beamline.converters.families.marian import architecture, map_weights
from beamline.converters.modules.graphs import SearchConstants
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.serving.contract.manifest import (
    DecodingDefaults,
    File,
    Limits,
    Manifest,
    Tokenizers,
    Vocabulary,
    read_manifest,
)
from tests.support.fixture_cache import fixture_cache

PAD, EOS, SECOND_EOS, BAD = 59, 0, 1, 7
VOCABULARY = 60
MAX_LENGTH = 64
NO_FILE = File(file="none", sha256="")
# Found by trying: the target must depend on the source, and neither repeat itself for ever nor end at once.
SPREAD = {"lm_head": 0.4, "encoder.embed": 0.4, "embed": 0.3, "encoder_attn": 0.4}


@dataclass(frozen=True)
class MarianShape:
    # The cache of fixtures asks for its `repr`: neither where it lies, nor what torch prints of it.
    original: MarianMTModel = field(repr=False)
    folder: Path = field(repr=False)
    manifest: Manifest
    renormalise: bool


def make_original(seed: int = 0) -> MarianMTModel:
    torch.manual_seed(seed)
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        activation_function="swish",
        max_position_embeddings=MAX_LENGTH,
        scale_embedding=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        tie_word_embeddings=False,  # tied ones repeat themselves
    )
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_positions" not in name:
                parameter.normal_(std=next((std for part, std in SPREAD.items() if part in name), 0.1))
        model.final_logits_bias[0, EOS] = 3.4  # so that sentences end after a while
        model.final_logits_bias[0, SECOND_EOS] = 1.5
        model.final_logits_bias[0, PAD] = -4
    model.generation_config.bad_words_ids = None
    model.generation_config.max_length = MAX_LENGTH
    return model


def exported(folder: Path, *, eos_ids: tuple[int, ...], renormalise: bool) -> MarianShape:
    fixture_cache().fill(folder, export, eos_ids=eos_ids, renormalise=renormalise)
    return MarianShape(make_original(), folder, read_manifest(folder), renormalise)


def export(folder: Path, *, eos_ids: tuple[int, ...], renormalise: bool) -> None:
    original = make_original()
    content = original.config.to_dict()
    tensors = {name: tensor.detach() for name, tensor in original.state_dict().items()}
    bias = tensors.pop("final_logits_bias")[0]
    config = architecture(content, tensors, output_bias=True)
    model = EncoderDecoderTransformer(config).eval()
    model.load_state_dict(map_weights(tensors, config, bias))
    steps = EncoderDecoderSteps(model)
    forbidden = (BAD,) if renormalise else ()
    constants = SearchConstants(eos_ids, max(2, 1 + len(eos_ids)), renormalise, forbidden)
    files = export_graphs(steps, constants, folder, lambda step: None)
    manifest = Manifest(
        name="marian-shape",
        version=1,
        family="marian",
        graphs=files.graphs,
        weights=files.weights,
        tokenizers=Tokenizers(source=NO_FILE, target=NO_FILE),
        state=tuple(steps.state_tensors()),
        vocabulary=Vocabulary(
            source_size=VOCABULARY, target_size=VOCABULARY, pad_id=PAD, eos_ids=eos_ids, decoder_start_id=PAD
        ),
        limits=Limits(max_source_length=MAX_LENGTH, max_target_length=MAX_LENGTH, max_beam_size=8),
        defaults=DecodingDefaults(beam_size=4, max_length=MAX_LENGTH),
        forbidden_in_graph=forbidden,
    )
    (folder / "manifest.json").write_text(manifest.to_json())
