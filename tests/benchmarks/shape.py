"""The model that is measured: the shape of a published Marian model, with random weights, for all three systems.

Nobody needs to be kept from ending early: the end word's embedding, which is also its output row, is zero, and so is
its logit, far below the best ones of 58,101. The padding word's is zero too, because CTranslate2 starts from nothing.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from beamline.converters.certificate.graph_runner import Case
from beamline.converters.checkpoints.generation_config import decoding_defaults
from beamline.converters.export import export_graphs
from beamline.converters.families.marian import architecture, map_weights, vocabulary_of
from beamline.converters.loaders.reference import limits_for
from beamline.converters.modules.graphs import SearchConstants
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.passes.calibration import calibrate
from beamline.serving.contract.manifest import MANIFEST_FILE, Manifest, Tokenizers
from tests.benchmarks.made import ROOT, converters, hash_of, once
from tests.benchmarks.prose import english_sentences
from tests.support.few_bits import write_few_bits
from tests.support.marian_shape import NO_FILE
from tests.support.processes import run_beamline

SOURCE_LENGTH = 26  # with the end word
TARGET_LENGTH = 30
_VOCABULARY = 58_101
_EOS, PAD = 0, _VOCABULARY - 1
_SEED = 1


def sentences(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[*(rng.randrange(2, PAD) for _ in range(SOURCE_LENGTH - 1)), _EOS] for _ in range(count)]


def original(cache: Path) -> Path:
    """The Hugging Face directory."""
    return once(cache / f"marian-{hash_of(Path(__file__))}", _write_original)


def for_beamline(cache: Path) -> Path:
    """Converted for us, anew whenever a converter has changed."""
    source = original(cache)
    return once(cache / f"beamline-{_hash_of_converters()}", lambda folder: _export(source, folder))


def for_beamline_in_int8(cache: Path) -> Path:
    """The same with 8-bit weights, calibrated by other sentences than those that are measured."""
    exported = for_beamline(cache)

    def quantise(folder: Path) -> None:
        manifest = write_few_bits(exported, folder, "int8")
        start = (manifest.vocabulary.start_id,)
        typical = [Case(tuple(sentence), start) for sentence in sentences(32, seed=1)]
        manifest, _ = calibrate(folder, manifest, typical)
        (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")

    return once(cache / f"beamline_int8-{_hash_of_converters()}", quantise)


def for_ctranslate2(cache: Path, python: Path) -> Path:
    return _in_ctranslate2(cache, "convert", original(cache), Path(__file__), python)


def for_optimum(cache: Path, python: Path) -> Path:
    """Exported by its own command, with the decoder that reads its cache."""
    source = original(cache)

    def export(folder: Path) -> None:
        what = ("--model", source, "--task", "text2text-generation-with-past")
        subprocess.run([python, "-m", "optimum.exporters.onnx", *map(str, what), folder], cwd=ROOT, check=True)

    return once(cache / f"optimum-{hash_of(Path(__file__))}", export)


def reference_for_ctranslate2(cache: Path, checkpoint: Path, python: Path) -> Path:
    """A checkpoint of our reference Transformer."""
    return _in_ctranslate2(cache, "reference", checkpoint, checkpoint / "model.safetensors", python)


def _in_ctranslate2(cache: Path, how: str, source: Path, made_of: Path, python: Path) -> Path:
    """Converted by one of the peers' scripts, anew whenever that or `made_of` has changed."""
    script = f"tests.benchmarks.peers.ctranslate2_{how}"

    def convert(folder: Path) -> None:
        subprocess.run([python, "-m", script, source, folder / "model"], cwd=ROOT, check=True)

    return (
        once(cache / f"ctranslate2_{how}-{hash_of(made_of, ROOT / (script.replace('.', '/') + '.py'))}", convert)
        / "model"
    )


def converted(cache: Path, checkpoint: Path, precision: str) -> Path:
    """A repository with one version of a checkpoint, by the real command."""

    def convert(folder: Path) -> None:
        arguments = ["--name", "en-de", "--repo", str(folder), "--precision", precision]
        if precision == "int8":
            typical = folder / "typical.txt"
            typical.write_text("\n".join(english_sentences(100)) + "\n", encoding="utf-8")
            arguments += ["--calibrate", str(typical)]
        found = run_beamline("convert", str(checkpoint), *arguments)
        if found.returncode:
            raise SystemExit(found.stderr)

    made_of = hash_of(checkpoint / "model.safetensors", *converters())
    return once(cache / f"repository_{precision}-{made_of}", convert)


def _write_original(folder: Path) -> None:
    config = MarianConfig(
        vocab_size=_VOCABULARY,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="swish",
        max_position_embeddings=512,
        scale_embedding=True,
        static_position_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=_EOS,
        forced_eos_token_id=None,
        decoder_start_token_id=PAD,
    )
    torch.manual_seed(_SEED)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "embed_positions" in name or "layer_norm" in name:
                continue
            if weights.dim() == 1:
                weights.normal_(std=0.02)
                continue
            weights.normal_(std=0.1 if "shared" in name else 0.06)
            # Without the next two, the output says one word for ever: attention averages the past away, and an
            # activation that is positive on average adds the same to every position.
            if "attn.out_proj" in name:
                weights.mul_(0.2)
            if "fc2" in name:
                weights.sub_(weights.mean(1, keepdim=True))
        model.model.decoder.layers[-1].final_layer_norm.weight.fill_(1.5)  # some words are clearly better
        model.model.shared.weight[[_EOS, PAD]] = 0
    model.generation_config = GenerationConfig(  # as published, but the end is not forced
        bad_words_ids=[[PAD]],
        decoder_start_token_id=PAD,
        eos_token_id=_EOS,
        max_length=512,
        num_beams=4,
        pad_token_id=PAD,
        renormalize_logits=True,
    )
    model.save_pretrained(folder)


def _export(source: Path, folder: Path) -> None:
    """As the Marian converter does, without tokenizers and without its proof, which takes minutes at this size."""
    model = MarianMTModel.from_pretrained(source, local_files_only=True)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    del tensors["final_logits_bias"]  # zero
    config = architecture(model.config.to_dict(), tensors, output_bias=False)
    transformer = EncoderDecoderTransformer(config).eval()
    transformer.load_state_dict(map_weights(tensors, config, None))
    steps = EncoderDecoderSteps(transformer)
    limits = limits_for(config.decoder.max_positions, config.decoder.vocab_size)
    forbidden = (PAD,)
    files = export_graphs(steps, SearchConstants((_EOS,), 2, True, forbidden), folder, lambda step: None)
    manifest = Manifest(
        name="marian-base-shape",
        version=1,
        family="marian",
        graphs=files.graphs,
        weights=files.weights,
        tokenizers=Tokenizers(source=NO_FILE, target=NO_FILE),
        state=tuple(steps.state_tensors()),
        vocabulary=vocabulary_of(model.config.to_dict(), config),
        limits=limits,
        defaults=decoding_defaults(model.generation_config.to_dict(), limits, str(source)),
        forbidden_in_graph=forbidden,
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json())


def _hash_of_converters() -> str:
    return hash_of(Path(__file__), *converters())
