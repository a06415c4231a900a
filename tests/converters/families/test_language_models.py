"""Language models as Hugging Face runs them, against the module that they are mapped onto: no export."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beamline.converters.families import converter_for, families
from beamline.converters.families.llama import LlamaConverter
from beamline.converters.loaders.language_models import LanguageModelConverter
from beamline.converters.modules.search.tree import Tree
from beamline.converters.modules.transformer.decoder_only import DecoderOnlyTransformer
from beamline.converters.modules.transformer.steps import DecoderOnlySteps
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from tests.converters.test_unsupported import Trap, edit, reasons_of
from tests.support.language_families import ONE_EACH, WINDOW
from tests.support.language_families import SHAPES as FAMILY_SHAPES
from tests.support.language_models import (
    CHAT_TEMPLATE,
    EOS,
    GPT2,
    LLAMA,
    POSITIONS,
    SECOND_EOS,
    SHAPES,
    SPECIAL,
    VOCABULARY,
    LanguageShape,
    write_language_model,
)

TOLERANCE = 1e-4  # of logits around 10


def build(original: Any) -> DecoderOnlyTransformer:
    family = next(each for each in families() if original.config.model_type in each.model_types)
    assert issubclass(family, LanguageModelConverter)
    return family.build(original)


def texts(count: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [*SHAPES, *FAMILY_SHAPES], ids=lambda shape: shape.name)
@torch.no_grad()
def test_every_shape_is_mapped_exactly(shape: LanguageShape) -> None:
    """Up to the last position: rules for long texts only differ there."""
    original = shape.original()
    tokens = texts(1, build(original).architecture.decoder.max_positions)
    torch.testing.assert_close(build(original)(tokens), original(input_ids=tokens).logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", [GPT2, LLAMA, *ONE_EACH], ids=lambda shape: shape.name)
@torch.no_grad()
def test_prompts_in_pieces_then_a_tree(shape: LanguageShape) -> None:
    """Two prompts of different lengths, longer than a window, then three beams each, of which all follow the second."""
    original = shape.original()
    steps = DecoderOnlySteps(build(original))
    lengths, entries, beams = torch.tensor([WINDOW + 7, WINDOW - 1]), WINDOW + 40, 3
    tokens = texts(2, WINDOW + 12)
    sizes = {"B": 2, "C": entries}
    caches = tuple(
        torch.zeros([sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape])
        for tensor in steps.state_tensors()
    )
    # The shorter one's padding is written, and written over.
    for begin, end in ((0, 4), (4, WINDOW - 1), (WINDOW - 1, WINDOW + 7)):
        own = torch.arange(begin, end)
        visible = (torch.arange(entries) <= own[:, None]).expand(2, -1, -1)
        first = torch.tensor([begin, begin])
        caches = steps.prefill(tokens[:, begin:end], first, Tree(first, visible), caches)
    ancestry = (torch.arange(entries) < lengths[:, None, None]).expand(-1, beams, -1)
    fed = texts(6, 2).reshape(2, beams, 2)
    write_index = lengths.clone()
    for number in range(2):
        tree = Tree.grow(ancestry, write_index)
        logits, caches = steps.step(fed[:, :, number], lengths + number, tree, (), caches)
        for row, length in enumerate(lengths.tolist()):
            for beam in range(beams):
                path = [fed[row, 1, 0]] * number + [fed[row, beam, number]]
                whole = torch.cat([tokens[row, :length], torch.stack(path)])[None]
                expected = original(input_ids=whole).logits[0, -1]
                torch.testing.assert_close(logits[row, beam], expected, rtol=0, atol=TOLERANCE)
        ancestry, write_index = tree.ancestry_of(torch.ones(2, beams, dtype=torch.long)), write_index + beams


# -- what lies in a directory ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("llama") / "source", LLAMA)


@pytest.fixture
def llama(llama_directory: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(llama_directory, tmp_path / "llama"))


@pytest.mark.parametrize("how", ["shards", "pytorch_model.bin", "sharded pytorch_model.bin", "bfloat16"])
@torch.no_grad()
def test_weights_in_every_wrapping(llama: Path, tmp_path: Path, how: str) -> None:
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    if how == "shards":
        LLAMA.original().save_pretrained(llama, max_shard_size="20KB")
        assert len(list(llama.glob("model-*.safetensors"))) > 2
    elif how == "pytorch_model.bin":
        torch.save(weights, llama / "pytorch_model.bin")
    elif how == "bfloat16":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
        save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(weights)
        for number, part in enumerate((names[::2], names[1::2])):
            torch.save({name: weights[name] for name in part}, llama / f"pytorch_model-{number}.bin")
        index = {name: f"pytorch_model-{place % 2}.bin" for place, name in enumerate(names)}
        (llama / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    loaded = LlamaConverter(llama).load()
    tokens = texts(2, 20)
    original = LLAMA.original()
    if how == "bfloat16":
        original.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    expected = original(input_ids=tokens).logits
    torch.testing.assert_close(loaded.original(tokens), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(cast(DecoderOnlySteps, loaded.model).score(tokens), expected, rtol=0, atol=TOLERANCE)


def test_what_a_model_brings_along(llama: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 30, "repetition_penalty": 1.1}
    edit(llama / "generation_config.json", **settings)
    loaded = LlamaConverter(llama).load()
    assert loaded.task == "generate"
    assert loaded.vocabulary.eos_ids == (EOS, SECOND_EOS)
    assert loaded.vocabulary.decoder_start_id == 0
    assert (loaded.limits.max_source_length, loaded.limits.max_target_length) == (POSITIONS - 1, POSITIONS)
    defaults = loaded.defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 50, 0.9)
    assert (defaults.beam_size, defaults.max_new_tokens, defaults.max_length) == (1, 30, POSITIONS)
    assert defaults.repetition_penalty == 1.1
    assert (loaded.chat.template, loaded.chat.bos_token, loaded.chat.eos_token) == (CHAT_TEMPLATE, *SPECIAL[:2])


def test_lengths_and_stops_of_a_checkpoint(llama: Path) -> None:
    settings = {"max_length": 50, "min_length": 9, "min_new_tokens": 4, "num_beams": 3}
    edit(llama / "generation_config.json", **settings, num_return_sequences=2, forced_eos_token_id=EOS)
    edit(llama / "generation_config.json", renormalize_logits=True, bad_words_ids=[[9]], suppress_tokens=[7])
    loaded = LlamaConverter(llama).load()
    defaults = loaded.defaults
    assert (defaults.max_length, defaults.min_length, defaults.min_new_tokens) == (50, 9, 4)
    assert (defaults.num_hypotheses, defaults.forced_eos_id) == (2, EOS)
    assert loaded.renormalise
    assert loaded.forbidden == (9,)  # not 7: a request may replace suppress_tokens
    edit(llama / "generation_config.json", stop_strings=["END"], num_beams=1, num_return_sequences=1)
    assert LlamaConverter(llama).load().defaults.stop == ("END",)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"watermarking_config": {"bias": 2.0}}, "generation setting watermarking_config is {'bias': 2.0}, which is"),
        ({"max_time": 3.0}, "generation setting max_time is 3.0, which is not supported"),
        ({"do_sample": True, "num_beams": 2}, "generation settings do_sample and num_beams 2: beams that are drawn"),
        (
            {"stop_strings": "END", "num_beams": 2},
            "generation settings stop_strings and num_beams 2: beams that end at",
        ),
        ({"do_sample": True, "forced_eos_token_id": EOS}, "generation setting forced_eos_token_id is 1, which is not"),
        ({"forced_bos_token_id": 5}, "generation setting forced_bos_token_id is 5, which is not supported"),
        ({"sequence_bias": [[[5], 1.0]]}, "generation setting sequence_bias is "),
    ],
)
def test_a_setting_that_is_not_honoured_is_refused(llama: Path, settings: dict[str, Any], reason: str) -> None:
    edit(llama / "generation_config.json", **settings)
    (found,) = reasons_of(llama)
    assert found.startswith(reason)


def test_a_model_that_says_nothing_is_greedy(llama: Path) -> None:
    (llama / "generation_config.json").unlink()
    loaded = LlamaConverter(llama).load()
    assert (loaded.defaults.temperature, loaded.defaults.beam_size) == (0.0, 1)
    assert loaded.defaults.max_length == POSITIONS
    assert loaded.vocabulary.eos_ids == (EOS, SECOND_EOS)


# -- what can't be converted -----------------------------------------------------------------------------------------


def test_llama_says_every_reason(llama: Path) -> None:
    changes: dict[str, Any] = {
        "architectures": ["LlamaForSequenceClassification"],
        "hidden_act": "tanh",
        "rope_parameters": {
            "rope_type": "proportional",
            "rope_theta": 10_000.0,
            "factor": 4.0,
        },
    }
    edit(llama / "config.json", **changes)
    architecture, activation, rope = reasons_of(llama)
    assert architecture == "its architecture is LlamaForSequenceClassification, which is no language model"
    assert activation.startswith("hidden_act is 'tanh'; supported: ")
    assert rope == "rope_type is 'proportional'; supported: default, linear, dynamic, llama3, yarn, longrope"


def test_gpt2_says_every_reason(tmp_path: Path) -> None:
    options = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True}
    folder = write_language_model(tmp_path, GPT2)
    edit(folder / "config.json", **options)
    assert [reason.split()[0] for reason in reasons_of(folder)] == list(options)


def test_tensors_that_do_not_fit_are_named(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.layers.1.input_layernorm.weight"] = torch.zeros(5)
    weights["model.layers.0.adapter.weight"] = torch.zeros(2, 2)
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    assert reasons_of(llama) == [
        "model.layers.0.mlp.up_proj.weight is missing",
        "model.layers.0.adapter.weight is not a part of this architecture",
        "model.layers.1.input_layernorm.weight has shape [5], but its configuration says [32]",
    ]


def test_generation_settings_that_we_lack(llama: Path) -> None:
    edit(llama / "generation_config.json", do_sample=True, typical_p=0.5, guidance_scale=2.0)
    assert reasons_of(llama) == [
        "generation setting guidance_scale is 2.0, which is not supported",
        "generation setting typical_p is 0.5, which is not supported",
    ]


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path, LanguageShape("qwen2", "endless"))
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert reasons_of(folder) == ["nothing says which token ends a text: eos_token_id is missing"]


def test_a_pickle_with_code_is_never_run(llama: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(ConversionError, match="can't be read"):
        LlamaConverter(llama).load()
    assert not sprung.exists()


def test_code_beside_a_model_is_never_run(llama: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    (llama / "evil.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\n")
    edit(llama / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    with suppress(ConversionError):  # whether it is refused or taken for a plain Llama is their choice
        LlamaConverter(llama).load()
    assert not sprung.exists()


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ConversionError, match=r"x\.gguf can't be read"):
        converter_for(tmp_path / "x.gguf").load()


def test_a_tokenizer_larger_than_the_embedding_is_refused(llama: Path, tmp_path: Path) -> None:
    content = json.loads((llama / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": VOCABULARY, "content": "<|more|>"})
    (llama / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedCheckpoint, match=f"its tokenizer has {VOCABULARY + 1} words"):
        converter_for(llama).convert("more", tmp_path / "repository")
