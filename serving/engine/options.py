"""How one sequence is decoded. The words and their meanings are those of Hugging Face `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """Complete: the model's defaults are already filled in, and every value is checked. Lengths as in Hugging Face
    `generate`: they count the start token, the prefix, and the end token. A prompt's last token is its start token."""

    beam_size: int  # or how many samples
    num_hypotheses: int
    max_length: int
    min_length: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None
    start_id: int | None = None  # instead of the model's: of some, it is the target's language
    prefix: tuple[int, ...] = ()
    time_limit: float | None = None  # seconds from submission
    return_alignment: bool = False
    trace_candidates: int = 0  # how many a trace of the search may hold; 0: there is none
    # Sampling, where the temperature is above 0.
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_log_probs: int = 0  # how many of the likeliest tokens at each place are reported

    @property
    def samples(self) -> bool:
        return self.temperature > 0
