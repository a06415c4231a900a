"""Our own recurrent checkpoints: `config.json`, `model.safetensors` and a sentencepiece model, as the recipe in
`examples/translation` writes them."""

from __future__ import annotations

from dataclasses import replace

from beamline.converters.base import Converter, Loaded
from beamline.converters.checkpoint import fill, read_json, read_weights
from beamline.converters.families.reference import config_of, loaded, with_tied
from beamline.converters.modules.recurrent import Recurrent, RecurrentConfig
from beamline.converters.modules.recurrent_graphs import RecurrentSteps

MODEL_TYPE = "beamline_recurrent"


class RecurrentConverter(Converter):
    family = "recurrent"

    def load(self) -> Loaded:
        content = read_json(self.source / "config.json")
        config = config_of(RecurrentConfig, content, self.source)
        model = Recurrent(config)
        if config.source_features:  # no words are read: one vocabulary will do
            config = replace(config, source_vocab_size=config.target_vocab_size)
        embeddings = ("target_embedding.weight", "source_embedding.weight")
        fill(model, with_tied(read_weights(self.source), config, *embeddings), str(self.source))
        model.eval()
        return loaded(self.source, content, config, RecurrentSteps(model), model)
