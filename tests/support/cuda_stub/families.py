"""A small model of every family that there is, and of its kinds: exported as by a conversion, but not compared with its
original, which other tests do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.conversion import Draft
from beamline.converters.export import export_graphs
from beamline.converters.families import any_converter_for, families
from beamline.converters.passes.lowering import LOWERINGS, write_lowered
from beamline.converters.tasks.generation import GenerationConverter, search_constants
from beamline.serving.contract.manifest import Manifest
from examples.own_module.model import Digits
from examples.own_module.train import write as write_own_module
from tests.converters.families.test_recurrent_language import SHAPES as RECURRENT_LANGUAGE
from tests.converters.families.test_recurrent_language import shape_config, write_lively
from tests.support import language_families, language_models, pooled, recurrent, recurrent_users, seq2seq
from tests.support.captions import as_ours, show_attend_tell
from tests.support.checkpoints import (
    TorchShape,
    all_torch_shapes,
    torch_model,
    write_reference,
    write_torch_transformer,
)
from tests.support.encoder_decoder_pairs import PAIRS
from tests.support.fairseq import LEARNED, MULTILINGUAL, WMT19
from tests.support.fixture_cache import ROOT
from tests.support.marian import write_marian_directory
from tests.support.opennmt import OPENNMT

Kinds = Mapping[str, Callable[[Path], object]]  # by name: writes a checkpoint into a folder
# Model types whose graphs have the operators of another one's: only in the whole grid.
KIN = frozenset({"mbart", "pegasus", "mt5", "umt5", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3"})
KIN |= {"smollm3", "olmo2", "gpt_neox", "opt", "fairseq", "opennmt_py"}
OWN_MODULE = ROOT / "examples" / "own_module" / "model.py"


def kinds() -> dict[str, Kinds]:
    """By model type, as a checkpoint says it."""
    return {
        "own": {"digits": partial(write_own_module, Digits())},
        "beamline_transformer": {
            norm: partial(write_reference, norm=norm, activation=activation)
            for norm, activation in (("pre", "relu"), ("post", "gelu"))
        },
        "beamline_recurrent": {
            "captions": lambda folder: recurrent.write_recurrent(folder, as_ours(show_attend_tell())),
            **{shape.name: partial(_write_recurrent, shape=shape) for shape in _every_choice()},
        },
        "beamline_recurrent_pooled": {
            cell: partial(_write_pooled, cell=cell) for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        },
        "torch_transformer": {
            shape.name: partial(_write_torch_transformer, shape=shape)
            for shape in {(each.norm_first, each.activation): each for each in all_torch_shapes()}.values()
        },
        "torch_recurrent": {
            kind.__name__.lower(): partial(_write_user_model, kind=kind) for kind in recurrent_users.USER_MODELS
        },
        "torch_recurrent_pooled": {
            kind.__name__.lower(): partial(_write_user_classifier, kind=kind) for kind in pooled.USERS
        },
        "recurrent_language": {
            "-".join(map(str, shape)): partial(write_lively, config=shape_config(shape))
            for shape in {cell: each for each in RECURRENT_LANGUAGE for cell in each[:1]}.values()
        },
        "marian": {
            "shared": write_marian_directory,
            "separate": partial(write_marian_directory, separate_vocabs=True),
        },
        "encoder-decoder": {shape.name: partial(seq2seq.write_seq2seq, shape=shape) for shape in PAIRS},
        "fairseq": {
            shape.name: partial(seq2seq.write_seq2seq, shape=shape) for shape in (WMT19, MULTILINGUAL, LEARNED)
        },
        "opennmt_py": {OPENNMT.name: partial(seq2seq.write_seq2seq, shape=OPENNMT)},
        **_of(seq2seq.SHAPES, seq2seq.write_seq2seq),
        **_of((*language_models.SHAPES, *language_families.ONE_EACH), language_models.write_language_model),
    }


def left_out() -> list[str]:
    """Model types that the converters know, and of which there is no model here."""
    known = {model_type for family in families() for model_type in family.model_types}
    return sorted(known - set(kinds()))


def _of(shapes: Sequence[Any], write: Callable[..., Path]) -> dict[str, Kinds]:
    found: dict[str, dict[str, Callable[[Path], object]]] = {}
    for shape in shapes:
        found.setdefault(shape.family, {})[shape.name] = partial(write, shape=shape)
    return dict(found)


def _every_choice() -> list[recurrent.Shape]:
    """Each occurs in one of them; not with each other one: an operator has a kernel or not, whatever is beside it."""
    seen: set[tuple[str, Any]] = set()
    kept = []
    for shape in recurrent.covering_shapes():
        choices = {(name, getattr(shape, name)) for name in recurrent.VALUES}
        if choices - seen:
            kept.append(shape)
            seen |= choices
    return kept


def _write_recurrent(folder: Path, shape: recurrent.Shape) -> None:
    recurrent.write_recurrent(folder, recurrent.lively_recurrent(shape.config(recurrent.text_vocabulary())))


def _write_pooled(folder: Path, cell: str) -> None:
    pooled.write_pooled(folder, pooled.pooled_model(pooled.pooled_config(cell=cell)))


def _write_torch_transformer(folder: Path, shape: TorchShape) -> None:
    write_torch_transformer(folder, torch_model(shape))


def _write_user_model(folder: Path, kind: type[recurrent_users.UserModel]) -> None:
    recurrent_users.write_user_model(folder, recurrent_users.user_model(kind))


def _write_user_classifier(folder: Path, kind: type) -> None:
    pooled.write_user(folder, kind())


def write_kind(folder: Path, model_type: str, kind: str, precisions: Sequence[str]) -> None:
    """A version of it in float32 and in these, each a folder by its name; of what classifies or embeds, only the
    first."""
    with tempfile.TemporaryDirectory() as work:
        source, repository = Path(work) / "source", Path(work) / "repository"
        source.mkdir()
        kinds()[model_type][kind](source)
        converter = any_converter_for(*_place(model_type, source))
        if isinstance(converter, GenerationConverter):
            _write_precisions(folder, converter, precisions)
        else:
            converter.convert("m", repository)
            shutil.move(repository / "m" / "1", folder / "float32")


def _place(model_type: str, source: Path) -> tuple[Path, None, OwnFiles]:
    """Where `beamline convert` would be told to look."""
    if model_type != "own":
        return source, None, OwnFiles()
    files = (source / name for name in ("weights.safetensors", "source.json", "target.json"))
    return Path(f"{OWN_MODULE}:build"), None, OwnFiles(*files)


def _write_precisions(folder: Path, converter: GenerationConverter, precisions: Sequence[str]) -> None:
    plain = folder / "float32"
    plain.mkdir()
    manifest = _export(plain, converter)
    (plain / "manifest.json").write_text(manifest.to_json())
    for precision in precisions:
        lowering, target = LOWERINGS[precision], folder / precision
        lowered = write_lowered(plain, manifest, target, precision, lowering.graph, lowering.state(manifest.state))
        (target / "manifest.json").write_text(lowered.to_json())
        for file in plain.glob("*.json"):  # tokenizers
            if not (target / file.name).exists():
                shutil.copy(file, target)


def _export(folder: Path, converter: GenerationConverter) -> Manifest:
    loaded = converter.load()
    draft = Draft("m", 1, folder, "float32", lambda step: None)
    tokenizers = converter._save_tokenizers(loaded, folder)
    files = export_graphs(loaded.model, search_constants(loaded), folder, draft.advance)
    return converter._manifest(draft, loaded, files, tokenizers)
