"""The inputs of a call as sequences for the engine, each checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.request import Request
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import ModelCard, Tokenizer
from beamline.serving.text.options import bounded_by_source, decoding_options
from beamline.serving.text.splitting import Layout, split


@dataclass(frozen=True, slots=True)
class PreparedInput:
    requests: tuple[Request, ...]
    layout: Layout | None = None  # where the text was split: how the parts' translations are joined


class InputReader:
    """Pure and synchronous: it may run on any thread."""

    def __init__(self, card: ModelCard, source: Tokenizer, target: Tokenizer, limits: TextLimits) -> None:
        self._card = card
        self._source = source
        self._target = target
        self._limits = limits

    def read(self, request: pb.TranslateRequest) -> list[PreparedInput]:
        self._check_language("source_language", request.source_language, self._card.source_languages)
        self._check_language("target_language", request.target_language, self._card.target_languages)
        if not request.inputs:
            raise InvalidRequest(f"inputs is empty; give 1 to {self._limits.max_inputs}")
        if len(request.inputs) > self._limits.max_inputs:
            raise InvalidRequest(
                f"the call has {len(request.inputs)} inputs; at most {self._limits.max_inputs} are allowed"
            )
        asked = request.options
        self._check_size("options.target_prefix", asked.target_prefix)
        options = decoding_options(asked, self._card, self._target)
        prepared = [
            self._bounded(self._read_input(f"inputs[{index}]", item, options, asked.split_sentences), asked)
            for index, item in enumerate(request.inputs)
        ]
        self._check_count(sum(len(item.requests) for item in prepared))
        return prepared

    def _bounded(self, prepared: PreparedInput, asked: pb.DecodingOptions) -> PreparedInput:
        defaults = self._card.defaults
        if not defaults.max_length_factor or asked.HasField("max_length"):
            return prepared
        for request in prepared.requests:
            if request.options is not None:
                request.options = bounded_by_source(request.options, defaults, request.source_length)
        return prepared

    def _check_language(self, field: str, asked: str, known: Sequence[str]) -> None:
        if not asked or asked in known:
            return
        if not known:
            raise InvalidRequest(
                f"{field} is {asked[:40]!r}, but model {self._card.name} has no choice of languages: leave it empty"
            )
        raise InvalidRequest(f"{field} is {asked[:40]!r}; model {self._card.name} knows {', '.join(known)}")

    def _check_count(self, sequences: int) -> None:
        """A text of nothing but full stops has as many parts as letters."""
        limit = self._limits.max_sequences
        if sequences > limit:
            raise InvalidRequest(
                f"the call was split into {sequences} parts; at most {limit} are allowed: send it in several calls"
            )

    def _check_size(self, where: str, text: str) -> None:
        limit = self._limits.max_text_bytes
        # A character has one to four bytes, so most texts are settled without encoding them.
        if len(text) * 4 > limit and (len(text) > limit or len(text.encode("utf-8")) > limit):
            raise InvalidRequest(
                f"{where} is longer than {limit} bytes, the most that one text may have: send it in several"
            )

    def _read_input(self, where: str, item: pb.Input, options: DecodingOptions, split_sentences: bool) -> PreparedInput:
        kind = item.WhichOneof("kind")
        if self._card.feature_width:
            return PreparedInput((Request(options=options, features=self._features(where, item)),))
        if kind == "text":
            self._check_size(f"{where}.text", item.text)
            if not item.text.strip():
                raise InvalidRequest(f"{where}.text is empty; there is nothing to translate")
            if split_sentences:
                return self._read_parts(where, item.text, options)
            return self._whole(f"{where}.text", self._source.encode(item.text), options, can_split=True)
        if kind == "token_ids":
            return self._whole(f"{where}.token_ids", self._check_ids(where, item.token_ids.ids), options)
        if kind == "features":
            raise InvalidRequest(
                f"{where} has features, but model {self._card.name} reads text: give text or token_ids"
            )
        raise InvalidRequest(f"{where} is empty: give text or token_ids")

    def _features(self, where: str, item: pb.Input) -> NDArray[np.float32]:
        """[rows, columns], as a model that reads no text wants them."""
        width, limit = self._card.feature_width, self._card.limits.max_source_length
        if item.WhichOneof("kind") != "features":
            raise InvalidRequest(
                f"{where} has no features, but model {self._card.name} reads nothing else: "
                f"give 1 to {limit} rows of {width} columns"
            )
        rows, columns, count = item.features.rows, item.features.columns, len(item.features.values)
        if columns != width:
            raise InvalidRequest(f"{where}.features has {columns} columns; this model reads {width}")
        if not 1 <= rows <= limit:
            raise InvalidRequest(f"{where}.features has {rows} rows; this model reads 1 to {limit}")
        if count != rows * columns:
            raise InvalidRequest(
                f"{where}.features has {count} values; {rows} rows of {columns} columns are {rows * columns}"
            )
        values = np.array(item.features.values, np.float32)
        broken = np.flatnonzero(~np.isfinite(values))
        if broken.size:
            row, column = divmod(int(broken[0]), columns)
            raise InvalidRequest(
                f"{where}.features has {values[broken[0]]} in row {row}, column {column}; values must be finite"
            )
        return values.reshape(rows, columns)

    def _check_ids(self, where: str, ids: Sequence[int]) -> Sequence[int]:
        if not ids:
            raise InvalidRequest(f"{where}.token_ids has no ids; there is nothing to translate")
        size = self._card.vocabulary.source_size
        if max(ids) >= size:
            raise InvalidRequest(
                f"{where}.token_ids contains {max(ids)}; this model's source vocabulary has ids 0 to {size - 1}"
            )
        return ids

    def _whole(
        self, where: str, ids: Sequence[int], options: DecodingOptions, can_split: bool = False
    ) -> PreparedInput:
        limit = self._card.limits.max_source_length
        if len(ids) > limit:
            hint = "; set options.split_sentences to have it split, or send shorter texts" if can_split else ""
            raise InvalidRequest(f"{where} has {len(ids)} tokens; this model reads at most {limit}{hint}")
        if not ids:
            raise InvalidRequest(f"{where} has no tokens; there is nothing to translate")
        return PreparedInput((Request(tuple(ids), options),))

    def _read_parts(self, where: str, text: str, options: DecodingOptions) -> PreparedInput:
        layout, ids = split(text, self._source, self._card.limits.max_source_length)
        if len(ids) > 1:
            self._check_joinable(where, len(ids), options)
        # The translation begins with the prefix, not each of its sentences.
        later = replace(options, prefix=())
        requests = [
            self._whole(f"{where}.text, part {index + 1},", part_ids, later if index else options).requests[0]
            for index, part_ids in enumerate(ids)
        ]
        return PreparedInput(tuple(requests), layout)

    def _check_joinable(self, where: str, parts: int, options: DecodingOptions) -> None:
        """What has no meaning for a text that is put together from the translations of its parts."""
        if options.num_hypotheses > 1:
            raise InvalidRequest(
                f"num_hypotheses is {options.num_hypotheses}, but {where}.text was split into {parts} parts, "
                "of which only the best translations are joined: it must be 1, or split_sentences off"
            )
        if options.return_alignment:
            raise InvalidRequest(
                f"return_alignment needs a text of one part, but {where}.text was split into {parts}: "
                "leave it off, or split_sentences"
            )
