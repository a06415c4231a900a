"""Our own Transformer checkpoints, as the recipe in `examples/translation` writes them."""

from __future__ import annotations

from typing import ClassVar

from beamline.converters.checkpoints.files import fill, read_json, read_weights
from beamline.converters.loaders.reference import config_of, loaded, with_tied
from beamline.converters.modules.transformer.reference import Transformer, TransformerConfig
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel


class ReferenceTransformerConverter(GenerationConverter):
    family = "transformer"
    model_types: ClassVar[tuple[str, ...]] = ("beamline_transformer",)
    description = "Transformers that the recipe in `examples/translation` trains"

    def load(self) -> LoadedModel:
        content = read_json(self.source / "config.json")
        config = config_of(TransformerConfig, content, self.source)
        model = Transformer(config)
        embeddings = ("target_embedding.tokens.weight", "source_embedding.tokens.weight")
        fill(model, with_tied(read_weights(self.source), config, *embeddings), str(self.source))
        model.eval()
        return loaded(self.source, content, config, EncoderDecoderSteps(model), model)
