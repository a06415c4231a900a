"""Scoring by the engine, over real graphs: batches of different lengths against PyTorch, one by one."""

from __future__ import annotations

import pytest
import torch

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Scores
from beamline.serving.engine.request import Request, deliver
from beamline.serving.errors import Cancelled, ComputeError, DeadlinePassed, Overloaded, ShuttingDown
from tests.support.engines import make_engine, step
from tests.support.harness import Harness
from tests.support.lm_requests import prompt
from tests.support.marian_shape import PAD, MarianShape
from tests.support.tiny_lm import TinyModel

Question = tuple[tuple[int, ...] | None, tuple[int, ...], tuple[int, ...]]


def scored(
    engine: Engine, requests: list[tuple[tuple[int, ...] | None, tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[float, ...]]:
    answers: dict[int, Output] = {}
    for number, (source, target, labels) in enumerate(requests):

        def take(answer: Output, number: int = number) -> None:
            assert number not in answers, "answered twice"
            answers[number] = answer

        engine.submit(Request(source or (), on_output=take, target=target, labels=labels))
    while engine.busy:
        step(engine)
    found = [answers[number] for number in range(len(requests))]
    return [answer.log_probs for answer in found if isinstance(answer, Scores)]


def test_texts_of_a_language_model(tiny_lm: TinyModel) -> None:
    texts = [prompt(length) for length in (2, 300, 9, 40, 3, 120, 64)]
    found = scored(Harness(tiny_lm).engine, [(None, text[:-1], text[1:]) for text in texts])
    for text, values in zip(texts, found, strict=True):
        with torch.no_grad():
            rows = tiny_lm.original(torch.tensor([text[:-1]]))[0].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-3)


def test_translations_with_their_sources(plain_model: MarianShape) -> None:
    pairs = [((5, 6, 7), (8, 9)), ((10, 11), (12, 13, 14, 15)), ((5,) * 30, (20, 0))]
    engine = make_engine(plain_model.folder, plain_model.manifest)
    found = scored(engine, [(source, (PAD, *labels[:-1]), labels) for source, labels in pairs])
    for (source, labels), values in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = plain_model.original(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[PAD, *labels[:-1]]])
            ).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-3)


def test_one_text_at_a_time_while_others_decode(tiny_lm: TinyModel) -> None:
    harness = Harness(tiny_lm)
    options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=40, min_length=41)
    harness.engine.submit(Request(prompt(5), options, lambda answer: None))
    harness.step()
    answers: list[Output] = []
    for length in (5, 6, 7):
        harness.engine.submit(Request(target=prompt(length)[:-1], labels=prompt(length)[1:], on_output=answers.append))
    for number in (1, 2, 3):
        harness.step()
        assert len(answers) == number
        assert harness.stats[-1].active == 1


def test_what_can_go_wrong_with_a_text(tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tiny_lm)
    score_batch = harness.backend.score_batch

    def picky(sources: object, targets: list[tuple[int, ...]], labels: object) -> object:
        if any(13 in target for target in targets):
            raise RuntimeError("poisoned")
        return score_batch(sources, targets, labels)  # type: ignore[arg-type]

    monkeypatch.setattr(harness.backend, "score_batch", picky)
    good, bad, late, gone, over = list[Output](), list[Output](), list[Output](), list[Output](), list[Output]()
    harness.engine.submit(Request(target=(5, 6), labels=(6, 7), on_output=good.append))
    harness.engine.submit(Request(target=(5, 13), labels=(6, 7), on_output=bad.append))
    harness.engine.submit(Request(target=(5, 6), labels=(6, 7), on_output=late.append, deadline=-1.0))
    leaving = Request(target=(5, 6), labels=(6, 7), on_output=gone.append)
    harness.engine.submit(leaving)
    harness.engine.cancel(leaving.id)
    harness.step()
    assert [type(answer) for answer in (*good, *bad, *late, *gone)] == [Scores, ComputeError, DeadlinePassed, Cancelled]
    for _ in range(1000):
        harness.engine.submit(Request(target=(5, 6), labels=(6, 7), on_output=over.append))
    with pytest.raises(Overloaded, match=r"\(scoring\) is full \(1000 waiting\)"):
        harness.engine.submit(Request(target=(5, 6), labels=(6, 7), on_output=over.append))
    harness.engine.drain()
    with pytest.raises(ShuttingDown):
        harness.engine.submit(Request(target=(5, 6), labels=(6, 7), on_output=over.append))
    deliver(harness.engine.fail_everything(ShuttingDown("over")))
    assert len(over) == 1000
    assert not harness.engine.busy


def question(answers: list[Output], **settings: object) -> Request:
    return Request(target=(5, 6), labels=(6, 7), on_output=answers.append, **settings)  # type: ignore[arg-type]


def test_who_is_more_urgent_is_scored_first(tiny_lm: TinyModel) -> None:
    harness = Harness(tiny_lm)
    endless = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=40, min_length=41)
    harness.engine.submit(Request(prompt(5), endless, lambda answer: None))
    patient, usual, urgent = list[Output](), list[Output](), list[Output]()
    for answers, priority in ((patient, 3), (usual, 1), (urgent, 0)):
        harness.engine.submit(question(answers, priority=priority))
    seen = []
    for _ in range(3):  # beside somebody who decodes, one at every step
        harness.step()
        seen.append([len(answers) for answers in (urgent, usual, patient)])
    assert [stats.queued for stats in harness.stats[-3:]] == [2, 1, 0]
    assert seen == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert [finished.outcome for stats in harness.stats for finished in stats.finished] == [Outcome.OK] * 3


def test_who_waits_too_long_to_be_scored_is_refused(tiny_lm: TinyModel) -> None:
    harness = Harness(tiny_lm)
    late, patient = list[Output](), list[Output]()
    harness.engine.submit(question(late, queue_deadline=-1.0))
    harness.engine.submit(question(patient))
    harness.step()
    assert isinstance(late[0], Overloaded)
    assert "queue timeout" in str(late[0])
    assert isinstance(patient[0], Scores)
    assert [finished.outcome for finished in harness.stats[-1].finished] == [Outcome.QUEUE_TIMEOUT, Outcome.OK]
    assert not harness.engine.busy
