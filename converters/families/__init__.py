"""One file per family of checkpoints. Each only loads: `conversion.py` does the rest.

To add one, write its file and name its converter in `families()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from beamline.serving.errors import ConversionError

if TYPE_CHECKING:  # at run time only where a checkpoint is converted: torch takes seconds to import
    from beamline.converters.checkpoints.source import OwnFiles, Source
    from beamline.converters.tasks.generation import GenerationConverter
    from beamline.converters.tasks.pooling import PoolingConverter

    AnyConverter = GenerationConverter | PoolingConverter


class Family(Protocol):
    """What a family offers: a converter's class is one."""

    family: str  # as the manifest names it
    model_types: ClassVar[tuple[str, ...]]  # what checkpoints, or the configs that name their parts, call it
    description: ClassVar[str]  # a line of the table of supported models

    @classmethod
    def recognises(cls, source: Source) -> bool: ...

    @classmethod
    def from_source(cls, source: Source) -> AnyConverter:
        """The converter, whose `load` gives the model beside its original, or every reason against it."""


def families() -> tuple[type[Family], ...]:
    """All of them, in the order in which they are asked."""
    from beamline.converters.families.bart import BartConverter
    from beamline.converters.families.bloom import BloomConverter
    from beamline.converters.families.encoder_decoder_pair import EncoderDecoderPairConverter
    from beamline.converters.families.fairseq import FairseqConverter
    from beamline.converters.families.gemma import GemmaConverter
    from beamline.converters.families.gpt2 import Gpt2Converter
    from beamline.converters.families.gpt_neox import GptNeoXConverter
    from beamline.converters.families.llama import LlamaConverter
    from beamline.converters.families.m2m100 import M2M100Converter
    from beamline.converters.families.marian import MarianConverter
    from beamline.converters.families.olmo2 import Olmo2Converter
    from beamline.converters.families.opennmt_py import OpenNmtConverter
    from beamline.converters.families.opt import OptConverter
    from beamline.converters.families.own_module import OwnModuleConverter
    from beamline.converters.families.phi3 import Phi3Converter
    from beamline.converters.families.recurrent_language import RecurrentLanguageConverter
    from beamline.converters.families.reference_recurrent import ReferenceRecurrentConverter
    from beamline.converters.families.reference_recurrent_pooled import ReferenceRecurrentPooledConverter
    from beamline.converters.families.reference_transformer import ReferenceTransformerConverter
    from beamline.converters.families.smollm3 import SmolLM3Converter
    from beamline.converters.families.t5 import T5Converter
    from beamline.converters.families.torch_recurrent import TorchRecurrentConverter
    from beamline.converters.families.torch_recurrent_pooled import TorchRecurrentPooledConverter
    from beamline.converters.families.torch_transformer import TorchTransformerConverter

    return (
        OwnModuleConverter,  # first: its source is no folder
        ReferenceTransformerConverter,
        ReferenceRecurrentConverter,
        ReferenceRecurrentPooledConverter,
        TorchTransformerConverter,
        TorchRecurrentConverter,
        TorchRecurrentPooledConverter,
        RecurrentLanguageConverter,
        MarianConverter,
        BartConverter,
        M2M100Converter,
        T5Converter,
        EncoderDecoderPairConverter,
        FairseqConverter,
        OpenNmtConverter,
        Gpt2Converter,
        LlamaConverter,
        SmolLM3Converter,
        Olmo2Converter,
        GemmaConverter,
        Phi3Converter,
        GptNeoXConverter,
        OptConverter,
        BloomConverter,
    )


def any_converter_for(path: Path, config: Path | None = None, own: OwnFiles | None = None) -> AnyConverter:
    """Of the family that recognises a folder, a GGUF file, or `file.py:build`, which is one's own module."""
    from beamline.converters.checkpoints.source import OwnFiles, Source

    source, known = Source(path, config, own or OwnFiles()), families()
    for family in known:
        if family.recognises(source):
            return family.from_source(source)
    types = [name for family in known for name in family.model_types]
    where = source.path if source.path.is_file() else source.config_file
    raise ConversionError(
        f"{where}: model_type or family is {source.model_type!r}; known: {', '.join(types)}. "
        "Any other model can be brought as one's own module, file.py:build (docs/own-model.md); "
        "one built on torch.nn.Transformer, RNN, LSTM or GRU by a file that names its parts: --config FILE"
    )


def converter_for(path: Path, config: Path | None = None, own: OwnFiles | None = None) -> GenerationConverter:
    """The same, of a model that writes."""
    from beamline.converters.tasks.generation import GenerationConverter

    found = any_converter_for(path, config, own)
    if not isinstance(found, GenerationConverter):
        raise ConversionError(f"{path} is a model that only classifies or embeds")
    return found
