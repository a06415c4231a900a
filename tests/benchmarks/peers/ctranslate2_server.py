"""The usual way to serve translation, to be compared with: CTranslate2 behind an asyncio gRPC server that batches.

    python -m tests.benchmarks.peers.ctranslate2_server --model DIR --pieces spm.model --port 8011

It answers the same `Translate` as beamline does, so that one load tester measures both. Requests that wait while a
batch runs become the next batch, up to a size. It runs in the environment of CTranslate2, grpcio and sentencepiece.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


@dataclass(frozen=True)
class PendingRequest:
    pieces: list[str]
    beam: int
    answer: asyncio.Future[list[str]]


class Batcher:
    """One batch at a time on the translator's own threads; meanwhile the next one gathers."""

    def __init__(self, translator: Any, max_batch: int, max_wait: float, max_length: int) -> None:
        self._translator = translator
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._max_length = max_length
        self._queue: asyncio.Queue[PendingRequest] = asyncio.Queue()
        self._device = ThreadPoolExecutor(1)

    async def translate(self, pieces: list[str], beam: int) -> list[str]:
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        await self._queue.put(PendingRequest(pieces, beam, answer))
        return await answer

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            for beam in sorted({each.beam for each in batch}):  # one call has one beam size
                alike = [each for each in batch if each.beam == beam]
                try:
                    found = await loop.run_in_executor(self._device, self._translate, alike, beam)
                except Exception as error:
                    for each in alike:
                        if not each.answer.done():
                            each.answer.set_exception(error)
                    continue
                for each, pieces in zip(alike, found, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(pieces)

    async def _gather(self) -> list[PendingRequest]:
        """The first request, and those that arrive until the time is over or the batch is full."""
        batch = [await self._queue.get()]
        end = asyncio.get_running_loop().time() + self._max_wait
        while len(batch) < self._max_batch:
            try:
                left = end - asyncio.get_running_loop().time()
                if left > 0:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                else:
                    batch.append(self._queue.get_nowait())
            except (TimeoutError, asyncio.QueueEmpty):
                break
        return batch

    def _translate(self, batch: Sequence[PendingRequest], beam: int) -> list[list[str]]:
        found = self._translator.translate_batch(
            [each.pieces for each in batch],
            beam_size=beam,
            max_batch_size=self._max_batch,
            max_decoding_length=self._max_length,
            return_scores=False,
        )
        return [result.hypotheses[0] for result in found]


class Translation(InferenceServicer):
    def __init__(self, batcher: Batcher, text: Any, beam: int) -> None:
        self._batcher = batcher
        self._text = text
        self._beam = beam

    async def Translate(self, request: pb.TranslateRequest, context: Any) -> pb.TranslateResponse:
        beam = request.options.beam_size if request.options.HasField("beam_size") else self._beam
        sources = [[*self._text.encode(item.text, out_type=str), "</s>"] for item in request.inputs]
        found = await asyncio.gather(*(self._batcher.translate(source, beam) for source in sources))
        translations = [
            pb.Translation(
                hypotheses=[pb.Hypothesis(text=self._text.decode(target))],
                source_tokens=len(source),
                target_tokens=len(target) + 1,  # with its end
            )
            for source, target in zip(sources, found, strict=True)
        ]
        return pb.TranslateResponse(model="ctranslate2", translations=translations)


async def serve(options: argparse.Namespace) -> None:
    import ctranslate2
    import sentencepiece

    translator = ctranslate2.Translator(
        options.model,
        device="cpu",
        compute_type=options.compute_type,
        inter_threads=1,
        intra_threads=options.threads,
    )
    text = sentencepiece.SentencePieceProcessor(model_file=options.pieces)
    batcher = Batcher(translator, options.max_batch, options.max_wait_ms / 1000, options.max_length)
    server = grpc.aio.server()
    add_InferenceServicer_to_server(Translation(batcher, text, options.beam), server)
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    await batcher.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers.ctranslate2_server", description=__doc__)
    parser.add_argument("--model", required=True, help="a CTranslate2 model's folder")
    parser.add_argument("--pieces", required=True, help="its sentencepiece model, for both languages")
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compute-type", default="float32")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-wait-ms", type=float, default=2.0)
    parser.add_argument("--max-length", type=int, default=200)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
