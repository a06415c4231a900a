"""A model that writes, translating or generating: its graphs are an encoder or a prefill, a step, and a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from beamline.converters.certificate.text_cases import documentation_cases
from beamline.converters.certificate.verify import GRIDS, Certificate, Tolerance, verify
from beamline.converters.checkpoints.files import every_reason
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer
from beamline.converters.checkpoints.vocabularies import Examples, problems
from beamline.converters.conversion import Conversion, Draft, versions
from beamline.converters.export import ExportedFiles, export_graphs
from beamline.converters.modules.graphs import SearchConstants
from beamline.converters.modules.protocols import EncoderDecoder, LanguageModel, feature_width_of
from beamline.converters.passes.calibration import calibrate, calibration_cases
from beamline.converters.passes.lowering import lower
from beamline.serving.contract.manifest import (
    DecodingDefaults,
    File,
    Graphs,
    Languages,
    Limits,
    Manifest,
    Tokenizers,
    Vocabulary,
    Weights,
)
from beamline.serving.errors import UnsupportedCheckpoint
from beamline.serving.text.tokenizer import TextTokenizer

_NO_FILE = File(file="", sha256="")


@dataclass(frozen=True)
class Chat:
    """How a conversation becomes a prompt, where a model was trained for that."""

    template: str | None
    bos_token: str
    eos_token: str
    others: Mapping[str, str] = field(default_factory=dict)  # pad_token, unk_token and so on


NO_CHAT = Chat(None, "", "")


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint, ready for export, beside its original."""

    model: EncoderDecoder | LanguageModel
    original: Callable[..., Tensor]  # source, source_mask, target, or only the last -> logits, in plain PyTorch
    source_tokenizer: OriginalTokenizer
    target_tokenizer: OriginalTokenizer  # the same object where source and target share a vocabulary
    vocabulary: Vocabulary
    limits: Limits
    defaults: DecodingDefaults
    renormalise: bool = False
    source_languages: tuple[str, ...] = ()
    target_languages: tuple[str, ...] = ()
    languages: Languages | None = None
    examples: Examples | None = None  # where nothing else says which vocabulary is whose
    description: str = ""
    chat: Chat = NO_CHAT

    @property
    def task(self) -> Literal["translate", "generate"]:
        return "translate" if isinstance(self.model, EncoderDecoder) else "generate"

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Words that no request can ever want, and that the graph itself forbids, so that no rule has to at every step.
        Only where log-probabilities are renormalised: otherwise greedy's would lack these words' share."""
        if not self.renormalise:
            return ()
        words = {word[0] for word in self.defaults.bad_words if len(word) == 1}
        return tuple(sorted(words - set(self.vocabulary.eos_ids)))  # not suppress_tokens: a request may replace those


def search_constants(loaded: LoadedModel) -> SearchConstants:
    eos_ids = loaded.vocabulary.eos_ids
    return SearchConstants(eos_ids, max(2, 1 + len(eos_ids)), loaded.renormalise, loaded.forbidden)


class GenerationConverter(Conversion[LoadedModel, Tolerance, Manifest, Certificate]):
    def make(self, loaded: LoadedModel, draft: Draft, tolerance: Tolerance | None) -> tuple[Manifest, Certificate]:
        folder = draft.folder
        if isinstance(loaded.model, nn.Module):
            loaded.model.eval()
        tokenizers = self._save_tokenizers(loaded, folder)
        # What can't be is refused now, not after the export.
        planned = self._manifest(draft, loaded, _no_files(loaded), tokenizers)
        typical = calibration_cases(folder, planned, draft.typical) if draft.typical else []
        files = export_graphs(loaded.model, search_constants(loaded), folder, draft.advance)
        manifest = self._manifest(draft, loaded, files, tokenizers)
        draft.advance("verify")
        certificate = verify(folder, manifest, loaded, tolerance or Tolerance(), draft.each, GRIDS[draft.grid])
        if draft.precision != "float32":  # only what is proven to be the original is made smaller
            text = typical or documentation_cases(folder, manifest)
            for precision in draft.each(f"{draft.precision} beside float32", [draft.precision]):
                manifest, check = lower(folder, manifest, precision, text)
            certificate = replace(certificate, lowered=check)
        if typical:
            manifest, calibration = calibrate(folder, manifest, typical)
            certificate = replace(certificate, calibration=calibration)
        return manifest, certificate

    def _save_tokenizers(self, loaded: LoadedModel, folder: Path) -> Tokenizers:
        shared = loaded.source_tokenizer is loaded.target_tokenizer
        sizes = loaded.vocabulary.source_size, loaded.vocabulary.target_size
        if shared:
            file = self.save_tokenizer(loaded.source_tokenizer, folder / "tokenizer.json", min(sizes))
            saved = Tokenizers(source=file, target=file)
        else:
            saved = Tokenizers(
                source=self.save_tokenizer(loaded.source_tokenizer, folder / "source_tokenizer.json", sizes[0]),
                target=self.save_tokenizer(loaded.target_tokenizer, folder / "target_tokenizer.json", sizes[1]),
            )
        if loaded.examples is not None:
            served = (TextTokenizer.load(folder / each.file) for each in (saved.source, saved.target))
            if reasons := problems(loaded.examples, *served, shared=shared):
                raise UnsupportedCheckpoint(str(self.source), reasons)
        return saved

    def _manifest(self, draft: Draft, loaded: LoadedModel, files: ExportedFiles, tokenizers: Tokenizers) -> Manifest:
        with every_reason(self.source):
            return Manifest(
                name=draft.name,
                version=draft.version,
                task=loaded.task,
                family=self.family,
                graphs=files.graphs,
                weights=files.weights,
                tokenizers=tokenizers,
                state=tuple(loaded.model.state_tensors()),
                vocabulary=loaded.vocabulary,
                limits=loaded.limits,
                feature_width=feature_width_of(loaded.model),
                defaults=loaded.defaults,
                forbidden_in_graph=loaded.forbidden,
                source_languages=loaded.source_languages,
                target_languages=loaded.target_languages,
                languages=loaded.languages,
                chat_template=loaded.chat.template,
                bos_token=loaded.chat.bos_token,
                eos_token=loaded.chat.eos_token,
                special_tokens=dict(loaded.chat.others),
                description=loaded.description,
                created_with=versions(),
            )


def _no_files(loaded: LoadedModel) -> ExportedFiles:
    encoder = _NO_FILE if loaded.task == "translate" else None
    return ExportedFiles(Graphs(encoder=encoder, step=_NO_FILE, score=_NO_FILE), Weights(file="", sha256="", bytes=0))
