"""What the manifest of a recurrent classifier or embedder says of it."""

from __future__ import annotations

from typing import Any

from beamline.converters.modules.recurrent.pooled import PooledConfig


def pooled_settings(config: PooledConfig, description: str) -> dict[str, Any]:
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
