"""Our own recurrent classifiers and embedders: `config.json`, `model.safetensors` and a sentencepiece model."""

from __future__ import annotations

from typing import ClassVar

from beamline.converters.checkpoints.files import fill, read_json, read_weights
from beamline.converters.checkpoints.tokenizers import SentencePieceTokenizer
from beamline.converters.loaders.pooled_settings import pooled_settings
from beamline.converters.loaders.reference import TOKENIZER_FILE, config_of
from beamline.converters.modules.recurrent.pooled import PooledConfig, PooledGraph, RecurrentPooled
from beamline.converters.tasks.pooling import LoadedPooledModel, PoolingConverter


class ReferenceRecurrentPooledConverter(PoolingConverter):
    family = "recurrent"
    model_types: ClassVar[tuple[str, ...]] = ("beamline_recurrent_pooled",)
    description = "recurrent classifiers and embedders in our own format"

    def load(self) -> LoadedPooledModel:
        content = read_json(self.source / "config.json")
        config = config_of(PooledConfig, content, self.source)
        model = RecurrentPooled(config)
        fill(model, read_weights(self.source), str(self.source))
        model.eval()
        graph = PooledGraph(model)
        return LoadedPooledModel(
            graph=graph,
            outputs=graph.names,
            original=model.outputs,
            tokenizer=SentencePieceTokenizer(self.source / TOKENIZER_FILE, add_eos=True),
            settings=pooled_settings(config, str(content.get("description", ""))),
        )
