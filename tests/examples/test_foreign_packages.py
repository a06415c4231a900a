"""Models of packages that nobody here wrote, served: what the packages' own networks say, word by word."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.families import converter_for
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.engines import decode, make_engine, results

EXAMPLES = Path(__file__).parents[2] / "examples"
_PERSIAN = (
    "import json, sys, torch\n"
    "from g2p_fa.g2p_fa import G2P_Fa\n"
    "from g2p_fa.utils import IPA2tensor, IPA_LETTERS, word2tensor\n"
    "model = G2P_Fa().model.eval()\n"
    "for word in json.load(sys.stdin):\n"
    "    with torch.no_grad():\n"
    "        found = model(word2tensor(word)[:, None], IPA2tensor('b')[:, None], 0).argmax(2)[1:, 0].tolist()\n"
    "    ends = found.index(2) if 2 in found else len(found)\n"
    "    print(json.dumps(''.join(IPA_LETTERS[index - 3] for index in found[:ends])))\n"
)
_ARABIC = (
    "import json, sys, arabic_name_romanizer\n"
    "from pathlib import Path\n"
    "from arabic_name_romanizer.inference import OnnxModel\n"
    "folder = Path(arabic_name_romanizer.__file__).parent / 'resources'\n"
    "model = OnnxModel(folder, beam_width=1, batch_size=1)\n"  # together, a name's padding would change the others
    "for country, role, name in json.load(sys.stdin):\n"
    "    print(json.dumps(model.transliterate_units([name], country or None, 1, [role])[0][0][0]))\n"
)
PERSIAN = ["سلام", "کتاب", "ایران", "دانشگاه", "خورشید", "پنجره", "زبان", "گربه", "ژاله", "آسمان"]
ARABIC = ["محمد", "فاطمة", "خالد", "يوسف", "عائشة", "مصطفى", "إبراهيم", "زينب", "حسين", "نجلاء"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    wanted = ["g2p-fa==1.1.0", "arabic-name-romanizer==0.2.0"]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder), *wanted]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"the packages can't be installed here: {found.stderr.strip()[-300:]}")
    return folder


def asked(packages: Path, code: str, words: list[object]) -> list[str]:
    """What the package's own network says, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(words),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def served(version: Path, texts: list[str]) -> list[str]:
    manifest = read_manifest(version)
    source, target = (
        TextTokenizer.load(version / each.file) for each in (manifest.tokenizers.source, manifest.tokenizers.target)
    )
    defaults = manifest.defaults
    options = DecodingOptions(1, 1, max_length=defaults.max_length, bad_words=defaults.bad_words)
    answers = results(decode(make_engine(version, manifest), [(source.encode(text), options) for text in texts]))
    return [target.decode(answer.hypotheses[0].tokens) for answer in answers]


def made_up(letters: str, count: int) -> list[str]:
    chance = random.Random(7)
    return ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(count)]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_persian_sounds(packages: Path, tmp_path: Path) -> None:
    words = PERSIAN + made_up("".join(sorted(set("".join(PERSIAN)))), 200)
    folder = EXAMPLES / "g2p_fa"
    own = OwnFiles(packages / "g2p_fa" / "data" / "weights", folder / "letters.json", folder / "sounds.json")
    converter_for(folder / "model.py:G2pFa", own=own).convert("g2p-fa", tmp_path)
    expected = asked(packages, _PERSIAN, list(words))
    assert len(set(expected)) > 150
    assert served(tmp_path / "g2p-fa" / "1", words) == expected


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_arabic_names(packages: Path, tmp_path: Path) -> None:
    names = ARABIC + made_up("".join(sorted(set("".join(ARABIC)))), 200)
    chance = random.Random(3)
    given = [
        (chance.choice(["EG", "MA", "SA", ""]), chance.choice(["given", "surname", "unknown"]), name) for name in names
    ]
    resources = packages / "arabic_name_romanizer" / "resources"
    source = tmp_path / "names"
    source.mkdir()
    prepare = EXAMPLES / "arabic_names" / "prepare.py"
    subprocess.run([sys.executable, str(prepare), str(resources), str(source)], check=True, timeout=600)
    config = EXAMPLES / "arabic_names" / "parts.json"
    converter_for(source, config).convert("names", tmp_path / "repository")
    expected = asked(packages, _ARABIC, list(given))
    assert len(set(expected)) > 150
    texts = [f"<{country or 'UNK_COUNTRY'}><ROLE_{role.upper()}>{name}" for country, role, name in given]
    assert served(tmp_path / "repository" / "names" / "1", texts) == expected
