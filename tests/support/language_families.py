"""Small language models of every family that transformers' `generate` is asked about, three shapes of each at least.
Texts are longer than their windows, and long enough for outputs of over 200 tokens."""

from __future__ import annotations

from typing import Any

from tests.support.language_models import LanguageShape, rope

POSITIONS = 320
WINDOW = 24
_LONG = {"max_position_embeddings": POSITIONS}
_THREE = {"num_hidden_layers": 3}


def shape(family: str, name: str, seed: int = 0, **options: Any) -> LanguageShape:
    return LanguageShape(family, name, {**_LONG, **options}, seed)


def _gemma3(**full: Any) -> dict[str, Any]:
    """Two rules for angles."""
    local = {"rope_type": "default", "rope_theta": 100.0}
    return {"rope_parameters": {"sliding_attention": local, "full_attention": {"rope_theta": 10_000.0, **full}}}


def _longrope(width: int, **options: Any) -> dict[str, Any]:
    return {
        **rope(
            "longrope",
            short_factor=[1.0 + 0.1 * place for place in range(width // 2)],
            long_factor=[4.0] * (width // 2),
            original_max_position_embeddings=POSITIONS,
            **options,
        ),
        "original_max_position_embeddings": POSITIONS,
        "max_position_embeddings": 4 * POSITIONS,
    }


_GEMMA2 = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, **_THREE}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
_GEMMA3 = {**_GEMMA2, "sliding_window_pattern": 2, "tie_word_embeddings": True}

MISTRAL = shape("mistral", "mistral-window", sliding_window=WINDOW)
QWEN3 = shape("qwen3", "qwen3", head_dim=16)
GEMMA2 = shape("gemma2", "gemma2", **(_GEMMA2 | {"num_hidden_layers": 2}), **_CAPS)
GEMMA3 = shape("gemma3_text", "gemma3", **_GEMMA3, **_gemma3(rope_type="default"))
PHI4 = shape("phi3", "phi4-in-part", **_longrope(6, partial_rotary_factor=0.75))
SMOLLM3 = shape("smollm3", "smollm3", **_THREE, no_rope_layer_interval=2, tie_word_embeddings=True)
OLMO2 = shape("olmo2", "olmo2")
PYTHIA = shape("gpt_neox", "pythia", **rope("default", partial_rotary_factor=0.25))
OPT_350M = shape("opt", "opt-350m", do_layer_norm_before=False, word_embed_proj_dim=20)
BLOOM = LanguageShape("bloom", "bloom", {"seq_length": POSITIONS})
GEMMA = shape("gemma", "gemma", head_dim=16, num_key_value_heads=1, tie_word_embeddings=True)

ONE_EACH = (MISTRAL, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI4, SMOLLM3, OLMO2, PYTHIA, OPT_350M, BLOOM)
SHAPES = (
    *ONE_EACH,
    shape("mistral", "mistral-window-deep", **_THREE, sliding_window=7, num_key_value_heads=4),
    # Two, not one: of a window of one, transformers' cache keeps everything (its slice from -1 + 1 on).
    shape("mistral", "mistral-narrow", sliding_window=2, num_key_value_heads=1, head_dim=12),
    shape("qwen2", "qwen2-window", **_THREE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    shape(
        "qwen3", "qwen3-tied-biases", head_dim=8, num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True
    ),
    shape(
        "qwen3",
        "qwen3-window",
        **_THREE,
        head_dim=12,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    shape("gemma", "gemma-biases", head_dim=8, num_key_value_heads=4, attention_bias=True),
    shape("gemma", "gemma-grouped", **_THREE, head_dim=12, hidden_act="gelu"),
    shape("gemma2", "gemma2-uncapped", **_GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None),
    shape(
        "gemma2",
        "gemma2-tied",
        **_GEMMA2,
        **_CAPS,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    shape("gemma3_text", "gemma3-linear", **_GEMMA3, **_gemma3(rope_type="linear", factor=8.0), num_key_value_heads=4),
    shape("gemma3_text", "gemma3-always-sliding", **_GEMMA3, layer_types=["sliding_attention"] * 3),
    shape("phi3", "phi3", num_key_value_heads=4),
    shape("phi3", "phi3-window", **_THREE, sliding_window=WINDOW, tie_word_embeddings=True),
    shape("phi3", "phi3-longrope", **_longrope(8)),
    shape("smollm3", "smollm3-all-rotary", no_rope_layers=[1, 1], attention_bias=True, mlp_bias=True),
    shape(
        "smollm3",
        "smollm3-window",
        **_THREE,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        **rope("yarn", factor=4.0, original_max_position_embeddings=80),
    ),
    shape("olmo2", "olmo2-all-heads", num_key_value_heads=4, attention_bias=True),
    shape("olmo2", "olmo2-tied", **_THREE, num_key_value_heads=1, tie_word_embeddings=True),
    shape("gpt_neox", "neox-one-by-one", use_parallel_residual=False, **rope("default", partial_rotary_factor=1.0)),
    shape(
        "gpt_neox",
        "neox-no-bias",
        **_THREE,
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu_new",
        **rope("linear", factor=4.0, partial_rotary_factor=0.5),
    ),
    shape("opt", "opt"),
    shape("opt", "opt-no-bias", **_THREE, enable_bias=False, activation_function="gelu", _remove_final_layer_norm=True),
    LanguageShape("bloom", "bloom-six-heads", {"seq_length": POSITIONS, "n_head": 6, "hidden_size": 36, "n_layer": 3}),
    LanguageShape("bloom", "bloom-untied", {"seq_length": POSITIONS, "n_head": 2, "tie_word_embeddings": False}),
)
