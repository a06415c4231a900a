"""Our own recurrent checkpoints, as the recipe in `examples/translation` writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from beamline.converters.checkpoints.files import fill, read_json, read_weights
from beamline.converters.loaders.reference import config_of, loaded, with_tied
from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
from beamline.converters.modules.recurrent.steps import RecurrentSteps
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel


class ReferenceRecurrentConverter(GenerationConverter):
    family = "recurrent"
    model_types: ClassVar[tuple[str, ...]] = ("beamline_recurrent",)
    description = "recurrent encoder-decoders that the recipe in `examples/translation` trains"

    def load(self) -> LoadedModel:
        content = read_json(self.source / "config.json")
        config = config_of(RecurrentConfig, content, self.source)
        model = Recurrent(config)
        if config.source_features:  # no words are read: one vocabulary will do
            config = replace(config, source_vocab_size=config.target_vocab_size)
        embeddings = ("target_embedding.weight", "source_embedding.weight")
        fill(model, with_tied(read_weights(self.source), config, *embeddings), str(self.source))
        model.eval()
        return loaded(self.source, content, config, RecurrentSteps(model), model)
