"""Our own recurrent classifiers and embedders: `config.json`, `model.safetensors` and a sentencepiece model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beamline.converters.checkpoint import fill, read_json, read_weights
from beamline.converters.families.reference import TOKENIZER_FILE, config_of
from beamline.converters.families.sentencepiece_text import SentencePieceText
from beamline.converters.modules.recurrent_pooled import PooledConfig, PooledGraph, RecurrentPooled
from beamline.converters.pooled import LoadedPooled, PooledConverter

MODEL_TYPE = "beamline_recurrent_pooled"


class RecurrentPooledConverter(PooledConverter):
    family = "recurrent"

    def load(self) -> LoadedPooled:
        content = read_json(self.source / "config.json")
        config = config_of(PooledConfig, content, self.source)
        model = RecurrentPooled(config)
        fill(model, read_weights(self.source), str(self.source))
        model.eval()
        graph = PooledGraph(model)
        return LoadedPooled(
            graph=graph,
            outputs=graph.names,
            original=model.outputs,
            text=SentencePieceText(Path(self.source) / TOKENIZER_FILE, add_eos=True),
            settings=manifest_settings(config, str(content.get("description", ""))),
        )


def manifest_settings(config: PooledConfig, description: str) -> dict[str, Any]:
    return {
        "task": "classify" if config.labels else "embed",
        "vocabulary_size": config.vocab_size,
        "pad_id": config.pad_id,
        "max_source_length": config.max_positions,
        "labels": config.labels,
        "multi_label": config.multi_label,
        "poolings": config.poolings,
        "width": config.memory_width,
        "normalize": config.normalize,
        "description": description,
    }
