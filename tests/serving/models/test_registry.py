from __future__ import annotations

import pytest

from beamline.serving.config import TextLimits
from beamline.serving.errors import InvalidRequest, ModelNotFound, ModelUnavailable
from beamline.serving.models.registry import Models
from beamline.serving.text.generator import Generator
from beamline.serving.text.host_work import TextWorkers
from beamline.serving.text.model_card import card_of
from beamline.serving.text.token_bytes import ByteTokenizer
from beamline.serving.text.translator import Translator
from tests.serving.doubles import EngineDouble, small_manifest


def model(name: str, version: int = 1) -> Translator:
    card = card_of(small_manifest(name=name, version=version))
    tokenizer = ByteTokenizer()
    return Translator(card, EngineDouble(), tokenizer, tokenizer, TextLimits(), TextWorkers())


def found(models: Models, name: str, version: str = "") -> tuple[str, int]:
    card = models.find(name, version).card
    return card.name, card.version


def test_an_empty_version_is_the_newest_by_number() -> None:
    models = Models([model("de", 10), model("de", 9), model("fr")])
    assert found(models, "de") == ("de", 10)
    assert found(models, "de", "9") == ("de", 9)


def test_an_empty_name_is_the_only_model_or_the_default() -> None:
    assert found(Models([model("de", 1), model("de", 2)]), "") == ("de", 2)
    assert found(Models([model("de"), model("fr")], default="fr"), "") == ("fr", 1)
    with pytest.raises(ModelNotFound, match="there are several: de, fr"):
        Models([model("fr"), model("de")]).find("", "")


def language_model(name: str) -> Generator:
    card = card_of(small_manifest(name=name, task="generate"))
    return Generator(card, EngineDouble(), ByteTokenizer(), TextLimits(), TextWorkers())


def test_an_empty_name_is_the_only_model_that_does_what_is_asked_for() -> None:
    models = Models([model("de"), language_model("lm")], default="de")
    with models.use_generator("", "") as generator, models.use_translator("", "") as translator:
        assert (generator.card.name, translator.card.name) == ("lm", "de")
    with models.use("", "") as scored:  # both can score: the default does
        assert scored.card.name == "de"
    models.replace("other", [language_model("other")], lambda _: None)
    with pytest.raises(ModelNotFound, match=r"there are several: lm, other; name one"), models.use_generator("", ""):
        pass
    alone = Models([model("de"), model("fr")], default="de")
    with pytest.raises(ModelNotFound, match="no model here continues a prompt; there is de, fr"):
        alone.use_generator("", "").__enter__()
    with pytest.raises(InvalidRequest, match="model 'de' is no language model"):
        Models([model("de")]).use_generator("", "").__enter__()


def test_a_call_without_a_name_is_told_why_nobody_can_answer() -> None:
    models = Models()
    with pytest.raises(ModelUnavailable, match="no model is served here now"):
        models.find("", "")
    models.explain({"de": "it was unloaded"})
    with pytest.raises(ModelUnavailable, match="model 'de' is not served now: it was unloaded"):
        models.find("", "")
    models.explain({"de": "it was unloaded", "fr": "it is broken"})
    for use, does in ((models.use, "writes text"), (models.use_pooled, "classifies or embeds")):
        sentence = f"no model that {does} is served now; not served are de, fr: name one"
        with pytest.raises(ModelUnavailable, match=sentence), use("", ""):
            pass
    # One that is served, but is of the wrong kind; the other may be what the caller wants, or there is none.
    models = Models([model("fr")])
    with (
        pytest.raises(ModelNotFound, match="no model here classifies or embeds; there is fr"),
        models.use_pooled("", ""),
    ):
        pass
    models.explain({"fr": "", "mood": "it was unloaded"})
    with pytest.raises(ModelUnavailable, match="model 'mood' is not served now"), models.use_pooled("", ""):
        pass


def test_no_other_model_answers_for_a_default_that_failed() -> None:
    models = Models([model("fr")])
    models.prefer(["de"])
    models.explain({"fr": "", "de": "weights.bin is corrupt"})
    with pytest.raises(ModelUnavailable, match=r"model 'de' is not served now: weights.bin is corrupt"):
        models.find("", "")
    assert found(models, "fr") == ("fr", 1)
    models.replace("de", [model("de")], lambda model: None)
    assert found(models, "") == ("de", 1)


@pytest.mark.parametrize("name", ["nl", "../de", "de/1", "x" * 10_000])
def test_unknown_names_are_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is de, fr") as caught:
        Models([model("de"), model("fr")]).find(name, "")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("version", ["3", "01", "latest", "-1"])
def test_unknown_versions_are_answered_with_the_known_ones(version: str) -> None:
    with pytest.raises(ModelNotFound, match="there is 1, 2"):
        Models([model("de", 1), model("de", 2)]).find("de", version)


def test_a_default_that_is_not_loaded_is_a_mistake() -> None:
    with pytest.raises(ModelNotFound, match="'nl' is not among"):
        Models([model("de")], default="nl").check_default()
