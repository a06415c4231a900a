"""The models in the box: whole, and able to speak."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc as rpc
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.models.engines import EngineSettings, load_engine
from beamline.serving.models.repository import newest, scan, verify
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.engines import decode, results
from tests.support.processes import ROOT, serving

REPOSITORY = ROOT / "model_repo"
MODELS = sorted(scan(REPOSITORY).models)
LONG = (
    "When you open a document that was written with an older version of the program, the assistant first asks whether "
    "it should make a copy of the file, because some of the settings that were used at that time, such as the page "
    "size, the colours of the background and the names of the fonts, have been removed or replaced, and then it shows "
    "you a list of everything that it was not able to convert, from which you can choose what you want to keep, what "
    "you want to delete and what you would rather look at later, although you should know that the pictures, the "
    "tables and the comments are only updated after the next restart, so that it is a good idea to save your work and "
    "to wait until the progress bar has reached the end before you switch off the computer, unless you are connected "
    "to the server of your company, where all of this is done by the administrator during the night, when nobody is "
    "at the office, and where you will find a message in your mailbox on the next morning that tells you which of "
    "your files have been changed and whom you can ask for help."
)
ODD = [
    "a",
    "?",
    "7",
    "3.14159, 2,718 and 1e10; 0x7fff",
    "👋",
    "🎉 👨‍👩‍👧 Thank you! 🎉",
    "https://www.example.org/a/b?c=d&e=f#g",
    "PLEASE DO NOT TURN OFF YOUR COMPUTER.",
    "%s: %d files in {0}, <b>bold</b> &amp; \\n",
    "これは日本語の文です。",
    "Это русское предложение.",
    "هذه جملة عربية",
    "Dieser Satz ist schon deutsch.",
    LONG,  # 200 words
]
REPEATED = ["!!!!!!!!!!!!!!!!!!!!", "x" * 100, "ha " * 50, "one two three " * 40]


def test_every_shipped_version_is_whole() -> None:
    repository = scan(REPOSITORY)
    assert not repository.problems
    assert "en-de" in repository.models
    for versions in repository.models.values():
        for version in versions:
            verify(version.folder, version.manifest)


def test_the_default_model_translates_as_the_readme_says() -> None:
    english, german = "The file could not be opened.", "Die Datei konnte nicht geöffnet werden."
    version = newest(scan(REPOSITORY).models["en-de"])
    settings = EngineSettings(threads=1, slots=2, warm_up=False)
    manifest = read_manifest(version.folder)
    engine = load_engine(version.folder, manifest, settings, lambda stats: None)
    tokenizer = TextTokenizer.load(version.folder / manifest.tokenizers.source.file)
    options = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=64)
    answer = results(decode(engine, [(tokenizer.encode(english), options)]))[0]
    assert tokenizer.decode(answer.hypotheses[0].tokens) == german


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.InferenceStub]:
    log = tmp_path_factory.mktemp("shipped") / "log.txt"
    with serving(log, "--repo", str(REPOSITORY)) as server, grpc.insecure_channel(server.grpc) as channel:
        yield rpc.InferenceStub(channel)


@pytest.mark.parametrize("model", MODELS)
def test_whatever_is_asked_is_answered_within_bounds(stub: rpc.InferenceStub, model: str) -> None:
    """A model that does not understand may repeat itself, but not for longer than the source lets expect."""
    texts = ODD + REPEATED
    inputs = [pb.Input(text=text) for text in texts]
    reply = stub.Translate(pb.TranslateRequest(model=model, inputs=inputs), timeout=300)
    for text, found in zip(texts, reply.translations, strict=True):
        assert 1 <= found.target_tokens <= 2 * found.source_tokens + 10, (text, found.hypotheses[0].text)


def test_the_default_model_ends_by_itself(stub: rpc.InferenceStub) -> None:
    """Whatever the script, by its own defaults. (What is nothing but repetition it may repeat.)"""
    inputs = [pb.Input(text=text) for text in ODD]
    reply = stub.Translate(pb.TranslateRequest(model="en-de", inputs=inputs), timeout=300)
    for text, translation in zip(ODD, reply.translations, strict=True):
        best = translation.hypotheses[0]
        assert best.finish_reason == pb.FINISH_REASON_EOS, (text, best.text)


@pytest.mark.parametrize("model", MODELS)
def test_nothing_to_translate_is_told_so(stub: rpc.InferenceStub, model: str) -> None:
    for text in ("", " ", "\n\t"):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Translate(pb.TranslateRequest(model=model, inputs=[pb.Input(text=text)]), timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "empty" in (caught.value.details() or "")


def test_one_text_too_long_is_told_so(stub: rpc.InferenceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Translate(pb.TranslateRequest(model="en-de", inputs=[pb.Input(text=LONG * 4)]), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "split" in (caught.value.details() or "")
