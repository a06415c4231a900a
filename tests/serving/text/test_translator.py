from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.text.host_work import TextWorkers
from beamline.serving.text.model_card import card_of
from beamline.serving.text.token_bytes import ByteTokenizer
from beamline.serving.text.translator import Translator
from tests.serving.doubles import EngineDouble


class Watched(ByteTokenizer):
    """Knows which threads it worked on."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def encode_batch(self, texts):
        self.threads.add(threading.current_thread().name)
        return super().encode_batch(texts)

    def decode(self, ids):
        self.threads.add(threading.current_thread().name)
        return super().decode(ids)


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    double = EngineDouble()
    double.start()
    yield double
    double.stop()


@pytest.mark.parametrize(("sentences", "large"), [(1, False), (1000, True)])
async def test_large_texts_leave_the_event_loop_free(engine: EngineDouble, sentences: int, large: bool) -> None:
    tokenizer = Watched()
    text = " ".join(["It is so."] * sentences)
    model = Translator(card_of(engine.manifest), engine, tokenizer, tokenizer, TextLimits(), TextWorkers())
    response = await model.translate(
        pb.TranslateRequest(inputs=[pb.Input(text=text)], options=pb.DecodingOptions(split_sentences=True)),
        None,
    )
    assert response.translations[0].hypotheses[0].text == text
    assert tokenizer.threads == ({"text_0", "large-text_0"} if large else {threading.current_thread().name})
