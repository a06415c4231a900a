"""One language model as its callers see it: a prompt in, its continuations out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.async_engine import AnyEngine
from beamline.serving.engine.outputs import Piece, Result, TraceStep
from beamline.serving.engine.request import Request
from beamline.serving.engine.search.history import Beginning
from beamline.serving.engine.stream import Stream
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.answers import Answer
from beamline.serving.text.chat import ChatTemplate
from beamline.serving.text.host_work import HostTime, ObserveHostTime, TextWorkers, ignore
from beamline.serving.text.inputs import InputReader
from beamline.serving.text.model_card import ModelCard, Tokenizer
from beamline.serving.text.options import generation_options, stop_strings
from beamline.serving.text.replies import milliseconds
from beamline.serving.text.scoring import TextScorer
from beamline.serving.text.search_traces import search_step, search_trace
from beamline.serving.text.stopping import best_first, reordered

_MAX_MESSAGES = 1024


class Generator:
    def __init__(
        self,
        card: ModelCard,
        engine: AnyEngine,
        tokenizer: Tokenizer,
        limits: TextLimits,
        workers: TextWorkers,
        observe: ObserveHostTime = ignore,
    ) -> None:
        self.card = card
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._inputs = InputReader(card.name, "continue", limits)
        self._workers = workers
        self._observe = observe
        self._scorer = TextScorer(card, engine, tokenizer, tokenizer, limits, workers, observe)
        self._chat = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template is not None else None

    async def score(self, request: pb.ScoreRequest, deadline: float | None) -> pb.ScoreResponse:
        return await self._scorer.score(request, deadline)

    async def stream(self, request: pb.GenerateRequest, deadline: float | None) -> AsyncGenerator[pb.GenerateReply]:
        """The pieces of all answers, as they come. Leave it through `contextlib.aclosing`."""
        time = HostTime()
        with time.reads():
            prepared = await self._workers.run(request.ByteSize(), lambda: self._read(request))
        answers = await self._open(request, prepared, deadline)
        traced: list[pb.SearchStep] = []
        async with aclosing(self._decode(prepared, answers, traced, deadline, time)) as steps:
            async for result in steps:
                replies = [reply for answer in answers if (reply := answer.new_reply()) is not None]
                if result is not None or traced:
                    replies = replies or [pb.GenerateReply()]
                if traced:
                    replies[0].search_steps.extend(traced)
                    traced.clear()
                if result is not None:
                    replies[-1].usage.CopyFrom(self._usage(prepared, answers, result))
                    if result.trace is not None:
                        replies[-1].search_trace.CopyFrom(search_trace(result.trace, self._tokenizer, with_steps=False))
                for reply in replies:
                    yield reply
        self._observe(time, 1)

    async def once(self, request: pb.GenerateRequest, deadline: float | None) -> pb.GenerateResponse:
        time = HostTime()
        with time.reads():
            prepared = await self._workers.run(request.ByteSize(), lambda: self._read(request))
        answers = await self._open(request, prepared, deadline)
        traced: list[pb.SearchStep] = []
        async with aclosing(self._decode(prepared, answers, traced, deadline, time)) as steps:
            result = [step async for step in steps][-1]
        assert result is not None
        assert prepared.options is not None
        with time.writes():
            places = list(range(len(answers)))
            if not prepared.options.samples:
                places = best_first([(answer.finish_reason, answer.score) for answer in answers])
            response = pb.GenerateResponse(
                model=self.card.name,
                version=str(self.card.version),
                generations=[answers[place].whole() for place in places],
                usage=self._usage(prepared, answers, result),
                timings=milliseconds([result.timings]),
            )
            if result.trace is not None:
                response.search_trace.CopyFrom(
                    search_trace(reordered(result.trace, places), self._tokenizer, with_steps=False)
                )
                response.search_trace.steps.extend(traced)
        self._observe(time, 1)
        return response

    # -- the way in ------------------------------------------------------------------------------------------------

    def _read(self, request: pb.GenerateRequest) -> Request:
        """The prompt and its options; pure, so that it may run on any thread."""
        prompt = self._prompt(request)
        limits, size = self.card.limits, self.card.vocabulary.source_size
        if not prompt and self.card.vocabulary.decoder_start_id is not None:
            prompt = [self.card.vocabulary.decoder_start_id]
        if not prompt:
            raise InvalidRequest("the prompt has no tokens, and this model has no token to begin with: give a text")
        self._inputs.token_ids("token_ids", prompt, size, "vocabulary")
        if len(prompt) > limits.max_source_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; this model reads at most {limits.max_source_length}"
            )
        options = generation_options(request.options, self.card, len(prompt))
        # The prompt is looked at here, which may be beside the event loop.
        return Request(tuple(prompt), options, beginning=Beginning(prompt, options.no_repeat_ngram_size))

    def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if kind == "chat":
            return self._tokenizer.encode_prefix(self._inputs.check_size("the prompt", self._rendered(request.chat)))
        if kind == "text":
            return self._tokenizer.encode(self._inputs.check_size("the prompt", request.text))
        raise InvalidRequest("the prompt is missing: give text, token_ids or chat")

    def _rendered(self, chat: pb.Chat) -> str:
        if self._chat is None:
            raise InvalidRequest(f"model {self.card.name} has no chat template: give text or token_ids")
        if not 1 <= len(chat.messages) <= _MAX_MESSAGES:
            raise InvalidRequest(f"chat has {len(chat.messages)} messages; give 1 to {_MAX_MESSAGES}")
        for number, message in enumerate(chat.messages):
            if not message.role:
                raise InvalidRequest(f"chat.messages[{number}] has no role; give system, user or assistant")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        begin = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        return self._chat.render(messages, begin)

    # -- the way out -----------------------------------------------------------------------------------------------

    async def _open(self, request: pb.GenerateRequest, prepared: Request, deadline: float | None) -> list[Answer]:
        """The answers to a prompt, which hold its echo where that was asked for."""
        assert prepared.options is not None
        prompt, stops = prepared.source, stop_strings(request.options, self.card.defaults)
        answers = [
            Answer(index, self._tokenizer, prompt, stops, request.options, prepared.options.length_penalty)
            for index in range(prepared.options.num_hypotheses)
        ]
        if request.options.echo:
            log_probs: Sequence[float | None] = [None] * len(prompt)
            if request.options.return_log_probs:
                log_probs = await self._scorer.log_probs(prompt, deadline)
            tokens = [
                pb.GeneratedToken(id=token, piece=self._tokenizer.token(token), log_prob=value, from_prompt=True)
                for token, value in zip(prompt, log_probs, strict=True)
            ]
            text = self._tokenizer.decode(prompt)
            for answer in answers:
                answer.echo(text, tokens)
        return answers

    async def _decode(
        self,
        prepared: Request,
        answers: Sequence[Answer],
        traced: list[pb.SearchStep],
        deadline: float | None,
        time: HostTime,
    ) -> AsyncGenerator[Result | None]:
        """Fills the answers, and the steps of the search where they are traced; yields when there is something new in
        them, at last with the result."""
        limit = self._limits.max_unread_tokens
        stream = Stream(self._engine, [prepared], deadline, max_in_flight=1, max_unread=limit)
        async with aclosing(stream.events()) as batches:
            async for batch in batches:
                result = None
                with time.writes():
                    for _, output in batch:
                        if isinstance(output, Result):
                            result = output
                            steps = output.trace.steps if output.trace is not None else ()
                            traced += [search_step(step, self._tokenizer) for step in steps]
                            for answer, hypothesis in zip(answers, output.hypotheses, strict=False):
                                answer.complete(hypothesis)
                        elif isinstance(output, TraceStep):
                            traced.append(search_step(output, self._tokenizer))
                        elif isinstance(output, Piece) and output.index < len(answers):
                            answer = answers[output.index]
                            answer.take(output)
                            if answer.stopped:
                                stream.stop(0, output.index)
                yield result

    def _usage(self, prepared: Request, answers: Sequence[Answer], result: Result) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(prepared.source),
            cached_tokens=result.cached_tokens,
            generated_tokens=sum(answer.tokens for answer in answers),
            model=self.card.name,
            version=str(self.card.version),
        )
