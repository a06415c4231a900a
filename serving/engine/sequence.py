"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from beamline.serving.contract.backend import Start
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.stats import Finished, Outcome
from beamline.serving.engine.request import Request, Result
from beamline.serving.engine.search.beam_search import Search
from beamline.serving.engine.search.logits_processors import Rules
from beamline.serving.engine.search.sampler import Samples

_LONGER = 1.5  # a group's longest source is at most so many times its shortest, and a few tokens
_A_FEW = 8


@dataclass(eq=False, slots=True)
class Job:
    request: Request
    submitted: float
    search: Search
    rules: Rules
    started: float = 0.0
    encode_seconds: float = 0.0
    cached_tokens: int = 0  # of the prompt
    streamed: list[int] = field(default_factory=list)  # how many tokens of each hypothesis have been told
    first_token: float | None = None

    @classmethod
    def of(cls, request: Request, manifest: Manifest, now: float) -> Job:
        options, source, vocabulary = request.options, request.source, manifest.vocabulary
        before: tuple[int, ...] = ()
        if manifest.task == "translate":
            start = vocabulary.start_id
        elif manifest.graphs.prefill is not None:
            before, start = source[:-1], source[-1]
        else:  # the prompt is taken in step by step, as a prefix that is forced
            start, rest = source[0], source[1:]
            shortest = options.min_length + len(rest) if options.min_length else 0
            options = replace(options, prefix=rest, max_length=options.max_length + len(rest), min_length=shortest)
        follow = Samples if options.samples else Search
        return cls(
            request,
            now,
            follow(options, start, vocabulary.eos_ids, len(before)),
            Rules(options, vocabulary.eos_ids, manifest.forbidden_in_graph, before),
            streamed=[0] * options.beam_size,
        )

    def start(self) -> Start:
        options = self.search.options
        independent = options.samples or options.beam_size == 1
        named = (*options.prefix, *(word for word, bias in options.logit_bias if bias > 0))
        return Start(self.search.start_token, options.beam_size, independent, options.samples, named)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def deadline(self) -> float | None:
        return self.request.deadline

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def queue_deadline(self) -> float | None:
        return self.request.queue_deadline

    @property
    def most_entries(self) -> int:
        """What it can come to need of a cache, if no two beams share anything."""
        options = self.search.options
        return self.search.used_entries + options.beam_size * (options.max_length - 1)

    @property
    def source_length(self) -> int:
        return len(self.request.reads)

    def out_of_time(self, now: float) -> bool:
        limit = self.request.options.time_limit
        return limit is not None and now - self.submitted >= limit

    def tell(self) -> None:
        """Passes on what has become certain."""
        progress = self.request.progress
        if progress is None:
            return
        for piece in self.search.news(self.streamed):
            self.streamed[piece.index] += len(piece.tokens)
            progress(piece)

    def record(self, answer: Result | Exception, outcome: Outcome, now: float) -> Finished:
        return Finished(
            outcome=outcome,
            queue_seconds=(self.started or now) - self.submitted,
            first_token_seconds=None if self.first_token is None else self.first_token - self.submitted,
            total_seconds=now - self.submitted,
            source_tokens=self.source_length,
            target_tokens=len(answer.hypotheses[0].tokens) if isinstance(answer, Result) else 0,
            encode_seconds=self.encode_seconds,
        )


def groups_by_length(jobs: Sequence[Job], most_tokens: int) -> Iterator[list[Job]]:
    """Groups to encode together: of similar length, so that little is computed for padding, and not too large."""
    group: list[Job] = []
    for job in sorted(jobs, key=lambda job: job.source_length):
        too_long = group and job.source_length > _LONGER * group[0].source_length + _A_FEW
        if group and (too_long or job.source_length * (len(group) + 1) > most_tokens):
            yield group
            group = []
        group.append(job)
    if group:
        yield group
