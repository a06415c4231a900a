"""The inputs of a Translate call as requests to the engine: split into sentences where wanted, each within the model's
limits."""

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
from beamline.serving.text.inputs import InputReader
from beamline.serving.text.languages import Direction, LanguageReader
from beamline.serving.text.model_card import ModelCard, Tokenizer
from beamline.serving.text.options import bounded_by_source, decoding_options, stop_strings, trace_candidates
from beamline.serving.text.splitting import Layout, split


@dataclass(frozen=True, slots=True)
class PreparedInput:
    requests: tuple[Request, ...]
    layout: Layout | None = None  # where the text was split: how the parts' translations are joined
    stops: tuple[str, ...] = ()  # strings before which a part's translation ends


class TranslationReader:
    """Synchronous: it may run on any thread."""

    def __init__(self, card: ModelCard, source: Tokenizer, target: Tokenizer, limits: TextLimits) -> None:
        self._card = card
        self._source = source
        self._target = target
        self._limits = limits
        self._inputs = InputReader(card.name, "translate", limits)
        self._languages = LanguageReader(card)
        self._last_options: tuple[tuple[bytes, Direction] | None, DecodingOptions | None] = None, None

    def check_count(self, inputs: int) -> None:
        self._inputs.check_count(inputs)

    def read(self, request: pb.TranslateRequest) -> list[PreparedInput]:
        self.check_count(len(request.inputs))
        text = any(item.WhichOneof("kind") == "text" for item in request.inputs)
        direction = self._languages.read(request.source_language, request.target_language, text=text)
        asked = request.options
        self._inputs.check_size("options.target_prefix", asked.target_prefix)
        options = self._options(asked, direction)
        split_sentences, stops = asked.split_sentences, stop_strings(asked, self._card.defaults)
        read = [
            self._bounded(self._read_input(f"inputs[{index}]", item, options, direction, split_sentences), asked)
            for index, item in enumerate(request.inputs)
        ]
        prepared = [replace(item, stops=stops) for item in read] if stops else read
        sequences = sum(len(item.requests) for item in prepared)
        self._check_count(sequences)
        if asked.return_search_trace:
            share = trace_candidates(sequences)
            for each in (each for item in prepared for each in item.requests):
                if each.options is not None:
                    each.options = replace(each.options, trace_candidates=share)
        return prepared

    def _options(self, asked: pb.DecodingOptions, direction: Direction) -> DecodingOptions:
        """Most calls ask for what the one before has asked for."""
        key = asked.SerializeToString(), direction
        last, options = self._last_options
        if options is None or key != last:
            options = decoding_options(asked, self._card, self._target, direction)
            if not options.samples:  # which have a seed of their own
                self._last_options = key, options
        return options

    def _bounded(self, prepared: PreparedInput, asked: pb.DecodingOptions) -> PreparedInput:
        defaults = self._card.defaults
        if not defaults.max_length_factor or asked.HasField("max_length"):
            return prepared
        for request in prepared.requests:
            if request.options is not None:
                request.options = bounded_by_source(request.options, defaults, request.source_length)
        return prepared

    def _check_count(self, sequences: int) -> None:
        """A text of nothing but full stops has as many parts as letters."""
        limit = self._limits.max_sequences
        if sequences > limit:
            raise InvalidRequest(
                f"the call was split into {sequences} parts; at most {limit} are allowed: send it in several calls"
            )

    def _read_input(
        self, where: str, item: pb.Input, options: DecodingOptions, direction: Direction, split_sentences: bool
    ) -> PreparedInput:
        if self._card.feature_width:
            return PreparedInput((Request(options=options, features=self._features(where, item)),))
        is_text = item.WhichOneof("kind") == "text"
        if is_text and split_sentences:
            return self._read_parts(where, self._inputs.text(f"{where}.text", item.text), options, direction)
        ids = self._inputs.read(where, item, self._source, self._card.vocabulary.source_size, "source vocabulary")
        if is_text:
            self._languages.completed(direction, f"{where}.text", ids)
            ids = direction.around(ids)
        return self._whole(f"{where}.text" if is_text else f"{where}.token_ids", ids, options, can_split=is_text)

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

    def _whole(
        self, where: str, ids: Sequence[int], options: DecodingOptions, can_split: bool = False
    ) -> PreparedInput:
        limit = self._card.limits.max_source_length
        if len(ids) > limit:
            hint = "; send shorter texts, or have it split (split_sentences)" if can_split else ""
            raise InvalidRequest(f"{where} has {len(ids)} tokens; this model reads at most {limit}{hint}")
        if not ids:
            raise InvalidRequest(f"{where} has no tokens; there is nothing to translate")
        return PreparedInput((Request(tuple(ids), options),))

    def _read_parts(self, where: str, text: str, options: DecodingOptions, direction: Direction) -> PreparedInput:
        layout, ids = split(text, self._source, self._card.limits.max_source_length - direction.length)
        # The first part has the language that the text itself names; those behind it get the same.
        later_parts = self._languages.completed(direction, f"{where}.text", ids[0] if ids else ())
        if len(ids) > 1:
            self._check_joinable(where, len(ids), options)
        # The translation begins with the prefix, not each of its sentences.
        later = replace(options, prefix=())
        requests = [
            self._whole(
                f"{where}.text, part {index + 1},",
                (later_parts if index else direction).around(part_ids),
                later if index else options,
            ).requests[0]
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
