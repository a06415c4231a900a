"""`python -m tests.benchmarks.families [--only bart-base]`: encoder-decoders of other families, beside CTranslate2.

The shapes of published models with random weights, the same for both: FLAN-T5-base, BART-base and NLLB-600M (which
takes some 12 GB of memory to make, and is left out unless it is named). CTranslate2 reads them by its own converter.
Every system is a process of its own and answers in turn, with as many tokens as the others; printed are milliseconds
for a batch, the ratios to the better of CTranslate2's two (below 1, we are faster) and to that of the same precision,
and how many answers have the same words. `--tiny` is for trying the module itself.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from beamline.converters.export import export_graphs
from beamline.converters.families.bart import BartConverter
from beamline.converters.families.m2m100 import M2M100Converter
from beamline.converters.families.t5 import T5Converter
from beamline.converters.loaders.reference import limits_for
from beamline.converters.loaders.seq2seq import Seq2SeqConverter
from beamline.converters.modules.graphs import SearchConstants
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.serving.contract.manifest import MANIFEST_FILE, DecodingDefaults, Manifest, Tokenizers, Vocabulary
from tests.benchmarks.environments import python_of
from tests.benchmarks.made import ROOT, converters, hash_of, once
from tests.benchmarks.measure import BEAMLINE, BEAMLINE_INT8, FLOAT32, INT8, Case, Measured
from tests.benchmarks.shape import SOURCE_LENGTH, TARGET_LENGTH
from tests.benchmarks.table import print_table
from tests.benchmarks.workers import Worker, wait_for_quiet
from tests.support.few_bits import write_few_bits
from tests.support.marian_shape import NO_FILE

_BOS, _PAD, _EOS, _UNKNOWN = range(4)
_IDS = {"bos_token_id": _BOS, "pad_token_id": _PAD, "eos_token_id": _EOS}
_CASES = (Case(1, 1), Case(1, 4), Case(8, 4), Case(32, 4))
_ENVIRONMENT = "ctranslate2_converters"
_SCRIPT = "tests.benchmarks.peers.ctranslate2_hugging_face"
_TINY = 8  # how many times smaller, in width and words


@dataclass(frozen=True)
class Shape:
    name: str
    converter: type[Seq2SeqConverter]
    make: Callable[[int], Any]  # the model; so many times smaller
    large: bool = False


def _bart_sizes(scale: int, width: int, layers: int, inner: int, heads: int, words: int) -> dict[str, Any]:
    return {
        "vocab_size": words // scale,
        "d_model": width // scale,
        "encoder_layers": layers if scale == 1 else 2,
        "decoder_layers": layers if scale == 1 else 2,
        "encoder_ffn_dim": inner // scale,
        "decoder_ffn_dim": inner // scale,
        "encoder_attention_heads": heads // min(scale, 4),
        "decoder_attention_heads": heads // min(scale, 4),
        "decoder_start_token_id": _EOS,
        "forced_eos_token_id": None,
        **_IDS,
    }


def _t5(scale: int) -> Any:
    config = T5Config(
        vocab_size=32128 // scale,
        d_model=768 // scale,
        d_kv=64 // min(scale, 4),
        d_ff=2048 // scale,
        num_layers=12 if scale == 1 else 2,
        num_heads=12 // min(scale, 4),
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=_PAD,
        **_IDS,
    )
    return T5ForConditionalGeneration(config)


def _bart(scale: int) -> Any:
    published = {"normalize_before": False, "normalize_embedding": True}  # CTranslate2 asks for these
    return BartForConditionalGeneration(BartConfig(**_bart_sizes(scale, 768, 6, 3072, 12, 50265), **published))


def _nllb(scale: int) -> Any:
    sizes = _bart_sizes(scale, 1024, 12, 4096, 16, 256206)
    return M2M100ForConditionalGeneration(M2M100Config(**sizes, scale_embedding=True))


SHAPES = (
    Shape("flan-t5-base", T5Converter, _t5),
    Shape("bart-base", BartConverter, _bart),
    Shape("nllb-600m", M2M100Converter, _nllb, large=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.families", description=__doc__)
    parser.add_argument("--only", choices=[shape.name for shape in SHAPES], help="one of them")
    parser.add_argument("--tiny", action="store_true", help="shapes that say nothing, to try this module")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=2, help="seconds to wait for a quiet moment (%(default)s)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where the models are kept")
    options = parser.parse_args()
    for shape in SHAPES:
        if shape.name == options.only or (options.only is None and (options.tiny or not shape.large)):
            _measure(shape, options)


def _measure(shape: Shape, options: argparse.Namespace) -> None:
    scale = _TINY if options.tiny else 1
    cache = options.cache.resolve() / "families" / f"{shape.name}{'-tiny' if options.tiny else ''}"
    source, ours, in_int8, theirs = made(shape, scale, cache)
    python, threads = python_of(_ENVIRONMENT), options.threads
    words = 4_000 if options.tiny else 30_000  # of which every shape has more
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(name, interpreter, module, arguments, threads))
            for name, interpreter, module, arguments in (
                (BEAMLINE, sys.executable, "beamline_worker", (ours, threads)),
                (BEAMLINE_INT8, sys.executable, "beamline_worker", (in_int8, threads)),
                (FLOAT32, python, "ctranslate2_worker", (theirs, threads, "float32")),
                (INT8, python, "ctranslate2_worker", (theirs, threads, "int8")),
            )
        ]
        found = [Measured(case) for case in _CASES]
        for number in range(options.rounds + 1):  # the first is to get warm
            for measured in found:
                for worker in workers:
                    wait_for_quiet(options.patience)
                    answer = worker.ask(_sentences(measured.case.batch, words), measured.case.beam)
                    if (lengths := set(map(len, answer.tokens))) != {TARGET_LENGTH}:
                        raise SystemExit(f"{worker.name} wrote {lengths} tokens, not {TARGET_LENGTH}: other work")
                    if number:
                        measured.answers.setdefault(worker.name, []).append(answer)
        _report(shape, source, workers, found, options)


def _sentences(count: int, words: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[*(chance.randrange(4, words) for _ in range(SOURCE_LENGTH - 1)), _EOS] for _ in range(count)]


def _report(
    shape: Shape, source: Path, workers: list[Worker], found: list[Measured], options: argparse.Namespace
) -> None:
    size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 2**20
    name = f"{shape.name}, tiny" if options.tiny else shape.name
    work = f"{SOURCE_LENGTH} source and {TARGET_LENGTH} target tokens"
    print(f"\n{name}: {size:,.0f} MiB of random weights, {work}, {options.threads} threads, best of {options.rounds}")
    print(", ".join(f"{worker.name}: {worker.version}" for worker in workers))
    names = [worker.name for worker in workers]
    ratios = ("ours / CT2", "int8 / CT2", "fp32 / fp32", "int8 / int8")
    rows: list[tuple[str, ...]] = [("batch x beam", *names, *ratios, "same words", "same in int8")]
    for measured in found:
        seconds = {name: measured.seconds(name) or 0.0 for name in names}
        rival = min(seconds[FLOAT32], seconds[INT8])
        ours, in_int8 = seconds[BEAMLINE], seconds[BEAMLINE_INT8]
        shown = (ours / rival, in_int8 / rival, ours / seconds[FLOAT32], in_int8 / seconds[INT8])
        rows.append(
            (
                str(measured.case),
                *(f"{1000 * each:.0f} ms" for each in seconds.values()),
                *(f"{each:.2f}" for each in shown),
                *("/".join(map(str, measured.identical(each))) for each in (FLOAT32, BEAMLINE_INT8)),
            )
        )
    print_table(rows)
    most = (max(answer.rss_mb for each in found for answer in each.answers[name]) for name in names)
    print("resident memory: " + ", ".join(f"{name} {size:,.0f} MB" for name, size in zip(names, most, strict=True)))


# -- what is measured ------------------------------------------------------------------------------------------------


def made(shape: Shape, scale: int, cache: Path) -> tuple[Path, Path, Path, Path]:
    """The Hugging Face directory, ours, ours in 8 bits, and CTranslate2's."""
    own = hash_of(Path(__file__))
    source = once(cache / f"source-{own}", lambda folder: _write(shape.make(scale), folder))
    code = hash_of(Path(__file__), *converters())
    ours = once(cache / f"beamline-{code}", lambda folder: _export(shape, source, folder))

    def quantise(folder: Path) -> None:
        write_few_bits(ours, folder, "int8")

    in_int8 = once(cache / f"beamline_int8-{code}", quantise)

    def convert(folder: Path) -> None:
        command = [str(python_of(_ENVIRONMENT)), "-m", _SCRIPT, str(source), str(folder / "model")]
        subprocess.run(command, cwd=ROOT, check=True)

    theirs = hash_of(Path(__file__), ROOT / (_SCRIPT.replace(".", "/") + ".py"))
    return source, ours, in_int8, once(cache / f"ctranslate2-{theirs}", convert) / "model"


@torch.no_grad()
def _write(model: Any, folder: Path) -> None:
    """Nobody is to end early: the end's output row is zero, and so is its logit, far below the best ones."""
    torch.manual_seed(1)
    for name, weights in model.named_parameters():
        if weights.dim() > 1 and weights.requires_grad:
            weights.normal_(std=0.1 if "shared" in name or "lm_head" in name else 0.04)
        if name.endswith(".q.weight"):
            weights /= 8  # T5 trains its queries to be divided by what others divide the scores by
    output = model.get_output_embeddings().weight
    output[[_EOS, _PAD]] = 0
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"t{_UNKNOWN}"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": _BOS, "pad_token": _PAD, "eos_token": _EOS, "unk_token": _UNKNOWN}
    special = {name: f"t{index}" for name, index in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _export(shape: Shape, source: Path, folder: Path) -> None:
    """As the converter does, without tokenizers and without its proof, which takes minutes at this size."""
    kinds: dict[type[Seq2SeqConverter], Any] = {
        T5Converter: T5ForConditionalGeneration,
        BartConverter: BartForConditionalGeneration,
        M2M100Converter: M2M100ForConditionalGeneration,
    }
    original = kinds[shape.converter].from_pretrained(source, local_files_only=True)
    model = shape.converter.build(original)
    steps, words = EncoderDecoderSteps(model), original.config.vocab_size
    limits = limits_for(model.architecture.decoder.max_positions, words)
    limits = limits.model_copy(update={"max_source_length": model.architecture.encoder.max_positions})
    files = export_graphs(steps, SearchConstants((_EOS,), 2, False, ()), folder, lambda step: None)
    manifest = Manifest(
        name=shape.name,
        version=1,
        family=shape.converter.family,
        graphs=files.graphs,
        weights=files.weights,
        tokenizers=Tokenizers(source=NO_FILE, target=NO_FILE),
        state=tuple(steps.state_tensors()),
        vocabulary=Vocabulary(
            source_size=words,
            target_size=words,
            pad_id=_PAD,
            eos_ids=(_EOS,),
            decoder_start_id=original.config.decoder_start_token_id,
        ),
        limits=limits,
        defaults=DecodingDefaults(max_length=limits.max_target_length),
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json())


if __name__ == "__main__":
    main()
