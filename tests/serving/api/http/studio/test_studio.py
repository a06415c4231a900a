"""The studio in a real Chromium, at the shipped models: every view, and what it draws against what the API says."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from beamline.serving.api.http.pages import page_file
from beamline.serving.config import ServeConfig
from beamline.serving.security.access import Scope
from beamline.serving.security.tokens import new_token
from tests.loadtest.browser import Browser
from tests.serving.api.http.studio.driver import (
    CONTROL,
    ENTER,
    RIGHT,
    TAB,
    TEXT,
    Studio,
    asked,
    in_chromium,
    in_thread,
    translation,
)
from tests.support.processes import PATIENCE
from tests.support.shipped import shipped


@in_chromium
@pytest.mark.parametrize("beams", [1, 4, 16])
def test_the_beam_tree_is_the_trace(studio: Studio, beams: int) -> None:
    studio.translate(TEXT, beams)
    expected = translation(studio.address, TEXT, beams)
    (trace,) = expected["search_traces"]
    if beams > 5:  # pruned ones are left out at first, so that it stays readable
        drawn = set(studio("[...document.querySelectorAll('.tree .node')].map((one) => one.dataset.fate)"))
        assert drawn == {"SEARCH_FATE_LIVE", "SEARCH_FATE_FINISHED"}
        studio.browser.click_through("document.querySelector('#beam-tree input[type=checkbox]').click();")
    count = sum(len(step["candidates"]) for step in trace["steps"])
    studio.wait(f"document.querySelectorAll('.tree .node').length === {count}")
    nodes = studio("[...document.querySelectorAll('.tree .node')].map((one) => ({...one.dataset}))")
    for node in nodes:
        candidate = trace["steps"][int(node["step"])]["candidates"][int(node["place"])]
        assert float(node["score"]) == pytest.approx(candidate.get("score", 0.0), abs=1e-4)
        assert node["fate"] == candidate["fate"]
    assert len({(node["step"], node["place"]) for node in nodes}) == count
    boxes = studio(
        "[...document.querySelectorAll('.tree .node rect')].map((one) => [one.x.baseVal.value, one.y.baseVal.value])"
    )
    assert len({tuple(box) for box in boxes}) == count  # none hides another
    winner = studio("[...document.querySelectorAll('.tree .node.answer')].map((one) => one.dataset)")
    end = trace["hypotheses"][0]
    assert max(int(each["step"]) for each in winner) == end["step"]
    # Scrubbing back shows the tree as it was.
    studio.fill("#beam-tree input[type=range]", "1")
    first = sum(len(step["candidates"]) for step in trace["steps"][:2])
    studio.wait(f"document.querySelectorAll('.tree .node').length === {first}")
    assert "step 2 of" in studio.text(".scrub output")


@in_chromium
def test_attention_confidence_and_the_n_best_are_the_answers(studio: Studio) -> None:
    studio.translate(TEXT, 4)
    expected = translation(studio.address, TEXT, 4)
    best = expected["hypotheses"][0]
    drawn = studio(
        "[...document.querySelectorAll('.heat .row')].map((row) => "
        "[...row.querySelectorAll('.cell')].map((cell) => Number(cell.dataset.weight)))"
    )
    assert len(drawn) == len(best["alignment"])
    for row, wanted in zip(drawn, best["alignment"], strict=True):
        assert row == pytest.approx(wanted["weights"], abs=1e-4)
    assert "geöffnet" in studio.text(".heat")
    listed = studio("[...document.querySelectorAll('.nbest button span:first-child')].map((one) => one.textContent)")
    assert listed == [each["text"] for each in expected["hypotheses"]]
    assert (
        " ".join(studio("[...document.querySelectorAll('.words span')].map((one) => one.textContent)")) == best["text"]
    )
    chances = studio("[...document.querySelectorAll('.words span')].map((one) => Number(one.dataset.probability))")
    assert all(0 < chance <= 1 for chance in chances)
    # Pointing at a word shows what it looked at; a click holds a row of the heat map.
    studio.browser.click_through("document.querySelector('.words span').focus();")
    studio.wait(
        "[...document.querySelectorAll('.source-strip span')]"
        ".some((one) => one.style.getPropertyValue('--attention') > 0.3)"
    )
    studio.browser.click_through(
        "document.querySelector('.heat .cell').dispatchEvent(new MouseEvent('click', {bubbles: true}));"
    )
    studio.wait("document.querySelector('.heat .frame')")
    studio.browser.click_through("document.querySelectorAll('.nbest button')[1].click();")
    studio.wait(
        f"document.querySelector('.words').textContent.includes({expected['hypotheses'][1]['text'].split()[2]!r})"
    )
    # Downloads: made in the page, asking nobody.
    studio.browser.click_through(
        "window.saved = [];"
        "HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); };"
        "for (const each of document.querySelectorAll('#attention .tools button, #beam-tree .tools button'))"
        "  each.click();"
    )
    studio.wait("window.saved.length === 4")
    assert sorted(studio("window.saved")) == ["attention.png", "attention.svg", "beam-tree.png", "beam-tree.svg"]


@in_chromium
def test_long_texts_go_sentence_by_sentence_and_errors_are_shown(studio: Studio) -> None:
    studio.fill("#text", f"{TEXT}\nPlease wait.")
    studio.go("document.querySelector('.plain')?.textContent.includes('\\n')")
    studio.wait("document.querySelector('.tree')")
    options = "[...document.querySelectorAll('.wide select option')].map((one) => one.textContent)"
    assert studio(options) == ["1 of 2", "2 of 2"]
    studio.option("Max length", "9999")
    studio.browser.click_through("document.querySelector('.primary').click();")
    studio.wait("document.querySelector('[role=alert]')")
    assert "max_length is 9999" in studio.text("[role=alert]")
    assert "400" in "".join(studio.browser.console())  # the browser's own line about it


@in_chromium
def test_a_translation_by_the_keyboard_alone(studio: Studio) -> None:
    studio.wait("document.activeElement && document.activeElement.id === 'text'")
    studio.fill("#text", TEXT)
    studio.browser.press(ENTER, holding=CONTROL)
    studio.wait("document.querySelector('.words')")
    for _ in range(20):
        studio.browser.press(TAB)
        if studio("document.activeElement.classList.contains('sure')"):
            break
    assert studio("document.querySelector('a, button, input, select, textarea').className") == "skip"
    first = studio("document.activeElement.textContent")
    studio.browser.press(RIGHT)
    assert studio("document.activeElement.textContent") != first
    studio.browser.click_through("document.querySelector('#beam-tree input[type=range]').focus();")
    studio.browser.press("\ue012")  # left
    studio.wait("!document.querySelector('.scrub output').textContent.startsWith('step 8')")
    unnamed = studio(
        "[...document.querySelectorAll('button, input, select, textarea')].filter((one) => !(one.textContent.trim() || "
        "one.getAttribute('aria-label') || one.closest('label'))).length"
    )
    assert unnamed == 0


@in_chromium
def test_a_narrow_screen_needs_no_sideways_scrolling(studio: Studio) -> None:
    try:
        studio.browser.resize(500, 900)  # Chromium's narrowest window
        studio.translate(TEXT, 16)
        drawn = {"translate": "#text", "score": "#source", "models": "#models tbody tr", "live": ".plot"}
        for view, part in drawn.items():
            studio.view(view)
            studio.wait(f"document.querySelector('{part}')")
            assert studio("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0, view
    finally:
        studio.browser.resize(1360, 1000)


# -- the other views ---------------------------------------------------------------------------------------------------


@in_chromium
def test_the_task_follows_the_model(studio: Studio) -> None:
    studio.view("score", "en-de-gru")
    studio.go()
    assert "perplexity" in studio.text("#answer")
    studio.view("generate", "fake-lm")
    studio.fill("#text", "hello there")
    studio.option("Temperature", "1")
    studio.option("Answers", "3")
    studio.go("document.querySelectorAll('.sample').length === 3")
    assert (
        studio("[...document.querySelectorAll('.sample .tokens')].map((one) => one.textContent.slice(0, 11))")
        == ["hello there"] * 3
    )
    assert studio.text("#beam-tree h2") == "Samples"
    studio.browser.click_through("document.querySelector('.sample .tokens span').focus();")
    studio.wait("document.querySelectorAll('.alternatives li').length === 5")
    studio.view("chat")
    studio.fill("#text", "hi")
    studio.go("document.querySelectorAll('.message').length === 2")
    assert studio("[...document.querySelectorAll('.message')].map((one) => one.textContent)") == [
        "userhi",
        "assistanthi",
    ]
    studio.view("translate", "captions")
    assert studio.text("nav a[aria-current]") == "Captions"
    studio.browser.click_through("Math.random = () => 0.8; document.querySelector('#random').click();")  # no chance
    studio.go("document.querySelectorAll('.heat .row').length > 1")
    assert studio("document.querySelectorAll('.heat .row:first-of-type .cell').length") == 4
    studio.view("classify", "mood")
    studio.go()
    assert studio("document.querySelectorAll('.labelled').length") == 2
    studio.view("embed")
    studio.go()
    matrix = studio("[...document.querySelectorAll('.matrix td')].map((one) => one.textContent).filter((one) => one)")
    assert len(matrix) == 9
    assert [matrix[0], matrix[4], matrix[8]] == ["1.00"] * 3


@in_chromium
def test_languages_have_names_and_their_tokens_are_no_words(studio: Studio) -> None:
    studio.view("translate", "nllb")
    listed = studio(
        "[...document.querySelectorAll('#target-language option')].map((one) => [one.value, one.textContent])"
    )
    names = dict(listed)
    assert len(listed) == 1 + 202
    assert len(set(names.values())) == len(listed)  # nobody has to guess
    assert (names["deu_Latn"], names["fra_Latn"]) == ("German", "French")
    assert names["zho_Hans"] == "Simplified Chinese"
    shown = [name for code, name in listed[1:] if name != code]  # a browser has names for most
    assert len(shown) > 100
    assert shown == [name for _, name in listed[1 : 1 + len(shown)]]  # those first,
    assert shown.index("French") < shown.index("German") < shown.index("Spanish")  # by name
    assert studio.text("#source-language option") == "English (default)"
    studio.fill("#text", "The value.")
    studio.option("Max length", "20")
    studio.browser.click_through("document.querySelector('.primary').click();")
    studio.wait("document.querySelector('[role=alert]')")  # it has no default for what it translates into
    assert "target_language" in studio.text("[role=alert]")
    assert "400" in "".join(studio.browser.console())
    studio.option("To", "deu_Latn")
    studio.go("document.querySelector('.words')")
    assert studio("document.querySelector('.output').lang") == "de"
    assert "deu_Latn" in studio.text(".heat")  # what the decoder began with is in the picture, and no word
    assert "deu_Latn" not in studio("document.querySelector('.words span').textContent")
    assert '"target_language": "deu_Latn"' in studio.text("#as-code pre")
    assert studio("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    studio.view("score")
    studio.option("To", "fra_Latn")
    studio.go()
    body = {"model": "nllb", "target_language": "fra_Latn", "sources": [{"text": "Save the file."}]}
    expected = asked(studio.address, "/v1/score", {**body, "texts": [{"text": "Speichern Sie die Datei."}]})["scores"][
        0
    ]
    assert f"{expected['perplexity']:.2f}" in studio.text(".figures")


@in_chromium
def test_tokens_are_one_stop_of_the_tab_key(studio: Studio) -> None:
    studio.view("generate", "fake-lm")
    studio.fill("#text", "hello")
    studio.go("document.querySelectorAll('.tokens span').length === 6")
    assert studio("[...document.querySelectorAll('.tokens span')].map((one) => one.tabIndex)") == [0, *[-1] * 5]
    assert studio.text(".tokens .mark") == "end"
    studio.browser.click_through("document.querySelector('.tokens span').focus();")
    studio.browser.press(RIGHT, RIGHT)
    assert studio("document.activeElement.textContent") == "l"
    assert studio("[...document.querySelectorAll('.tokens span')].map((one) => one.tabIndex)") == [
        -1,
        -1,
        0,
        -1,
        -1,
        -1,
    ]
    studio.browser.click_through("document.querySelector('#as-code [role=tab]').focus();")
    studio.browser.press(RIGHT, RIGHT)
    studio.wait("document.querySelector('#as-code pre').textContent.startsWith('from beamline import')")


@in_chromium
def test_a_message_that_is_refused_can_be_sent_again(studio: Studio) -> None:
    studio.view("chat", "fake-lm")
    studio.fill("#text", "hi")
    studio.option("Max tokens", "99999")
    studio.browser.click_through("document.querySelector('.primary').click();")
    studio.wait("document.querySelector('[role=alert]')")
    assert studio("document.querySelector('#text').value") == "hi"
    assert studio("document.querySelectorAll('.message').length") == 0
    assert "400" in "".join(studio.browser.console())


@in_chromium
def test_models_can_be_read_loaded_and_unloaded(studio: Studio) -> None:
    studio.view("models")
    row = "[...document.querySelectorAll('#models tbody tr')].find((one) => one.textContent.includes('en-de-gru'))"
    studio.wait(f"{row}?.querySelector('.ready')")
    studio.browser.click_through(f"{row}.querySelector('button').click();")
    studio.wait("document.querySelectorAll('.checks .passed').length >= 2")
    parity = json.loads((shipped("en-de-gru") / "parity.json").read_text())
    assert f"of {parity['beams_compared']}" in studio.text("#certificate")
    pooled = row.replace("en-de-gru", "mood")
    studio.browser.click_through(f"{pooled}.querySelector('button').click();")
    studio.wait("document.querySelector('#certificate').textContent.includes('The same label')")
    assert studio("document.querySelectorAll('.checks .passed').length") == 3
    button = f"[...{row}.querySelectorAll('button')].find((one) => one.textContent === "
    studio.browser.click_through(f"{button}'Unload').click();")
    studio.wait(f"{row}?.querySelector('.unavailable')")
    studio.browser.click_through(f"{button}'Load').click();")
    studio.wait(f"{row}?.querySelector('.ready')")


@in_chromium
def test_live_shows_what_was_answered(studio: Studio) -> None:
    asked(studio.address, "/v1/translate", {"model": "en-de", "inputs": [{"text": TEXT}] * 3})
    studio.view("live")
    studio.wait("document.querySelectorAll('.plot').length === 8")
    studio.wait("document.querySelectorAll('.batch .ok').length >= 3")
    assert {"requests", "tokens", "slots", "queue", "p95", "memory"} <= set(
        studio("[...document.querySelectorAll('.figure-card .name')].map((one) => one.textContent)")
    )
    assert TEXT not in studio.text("main")
    said = studio.text("#batch")  # with its slots, or as one that took none
    assert all(name in said for name in ("captions", "en-de", "en-de-gru", "fake", "fake-lm", "nllb"))


@in_chromium
def test_the_request_as_code_can_be_sent(studio: Studio) -> None:
    studio.fill("#text", "It's here.")
    code = "document.querySelector('#as-code pre').textContent"
    studio.wait(f"{code}.includes('here.')")
    curl = studio(code)
    assert curl.startswith(f"curl -s http://{studio.address}/v1/translate")
    body = json.loads(curl.split("-d '", 1)[1].rsplit("'", 1)[0].replace("'\\''", "'"))
    assert asked(studio.address, "/v1/translate", body)["translations"][0]["hypotheses"][0]["text"]
    studio.browser.click_through("document.querySelectorAll('#as-code [role=tab]')[1].click();")
    studio.wait(f"{code}.includes('beamline.v1.Inference/Translate')")
    studio.browser.click_through("document.querySelectorAll('#as-code [role=tab]')[2].click();")
    studio.wait(f"{code}.includes('client.translate(')")
    compile(studio(code), "as code", "exec")


@in_chromium
def test_the_api_is_documented_and_can_be_tried(studio: Studio) -> None:
    studio.browser.open(f"http://{studio.address}/docs")
    studio.wait("document.querySelectorAll('.opblock').length >= 10")
    assert "Translate texts" in studio.text("#docs")
    studio.browser.click_through("document.querySelector('.opblock-summary-control').click();")
    studio.wait("document.querySelector('.execute')")
    # Swagger UI shows its button a moment before it takes clicks.
    codes = "[...document.querySelectorAll('.live-responses-table tbody .response-col_status')]"
    answered = f"{codes}.some((one) => one.textContent.startsWith('200'))"
    studio.wait(f"{answered} || void document.querySelector('.execute').click()")


@in_chromium
def test_a_token_stays_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    token, entry = new_token("operator", (Scope.INFER, Scope.ADMIN), None)
    reader, second = new_token("reader", (Scope.INFER,), None)
    (tmp_path / "tokens.toml").write_text(f"{entry}\n{second}\n")
    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0, http_port=0, tokens=tmp_path / "tokens.toml")
    with in_thread(config) as address:
        browser.open(f"http://{address}/#live")
        studio = Studio(browser, address)
        studio.wait("document.querySelector('[role=alert]')")
        assert "bearer token" in studio.text("[role=alert]")
        assert studio("document.querySelector('#model')") is None  # without one, nothing that needs one

        def use(value: str) -> None:
            browser.click_through("document.querySelector('.token button').click();")
            studio.wait("document.activeElement.id === 'token'")
            studio.fill("#token", value)
            browser.press(ENTER)
            studio.wait("!document.querySelector('#token')")

        use(reader)
        studio.wait("document.querySelectorAll('.plot').length === 8")
        studio.wait("document.querySelector('#batch [role=alert]')?.textContent.includes('admin')")
        use(token)
        studio.wait("document.querySelector('#batch .idle')?.textContent.includes('fake-lm')")
        assert studio("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        browser.open("about:blank")
        browser.open(f"http://{address}/#models")
        studio.wait("document.querySelector('[role=alert]')")  # gone with the page
    browser.console(), browser.requested()


# -- what needs no browser -------------------------------------------------------------------------------------------


def test_the_first_load_is_small() -> None:
    first = ("index.html", "app.js", "app.css", "icon.svg")
    assert sum(len(page_file(name).compressed) for name in first) < 250_000
    assert all(gzip.decompress(page_file(name).compressed) == page_file(name).content for name in first)


def test_the_policy_is_strict_and_files_are_asked_for_once(server: str) -> None:
    for path in ("/", "/docs", "/studio/app.js", "/studio/app.css"):
        with urllib.request.urlopen(f"http://{server}{path}", timeout=PATIENCE) as response:
            policy = response.headers["content-security-policy"]
            tag = response.headers["etag"]
            content = response.read().decode()
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        if not path.startswith("/studio"):
            assert "<style" not in content
            assert "<script>" not in content
            assert "http" not in content
        again = urllib.request.Request(f"http://{server}{path}", headers={"if-none-match": tag})
        with pytest.raises(urllib.error.HTTPError) as same:
            urllib.request.urlopen(again, timeout=PATIENCE)
        assert same.value.code == 304
        same.value.close()
