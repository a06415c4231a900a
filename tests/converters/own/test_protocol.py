"""Modules of one's own that break the protocol, and one that keeps a cache by it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.families import converter_for
from beamline.converters.own.load import Origin, build
from beamline.serving.cli import main
from beamline.serving.contract.manifest import StateKind, read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from tests.support.compiled import compile_version
from tests.support.engines import decode, make_engine, results
from tests.support.own_modules import convert, write_module
from tests.support.ties import same_or_tie

BEAM = DecodingOptions(beam_size=4, num_hypotheses=4, max_length=12)

BROKEN = """
import torch
from torch import nn
from beamline.converters.own import Settings, Stepped, memory, read_sequence, recurrent

class Model(nn.Module):
    settings = Settings(source_vocab_size=12, target_vocab_size=13, pad_id=0, eos_ids=(1,), decoder_start_id=2)

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 8)
        self.cell = nn.GRUCell(8, 8)
        self.output = nn.Linear(8, 13)

    def states(self):
        return [memory("read", "S", 8), recurrent("hidden", 8)]

    def encode(self, source, source_mask):
        return {"read": self.words(source)}

    def initial_state(self, memory):
        return {"hidden": memory["read"][:, 0]}

    def step(self, now):
        x, hidden = self.words(now.tokens), now.states["hidden"]
        hidden = self.cell(x.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, now.tokens.shape)
        return Stepped(self.output(hidden), {"hidden": hidden})

def build():
    return Model()
"""


CACHED = (
    BROKEN.replace('recurrent("hidden", 8)]', 'cache("keys", 2, 4), cache("values", 2, 4)]')
    .replace('return {"hidden": memory["read"][:, 0]}', "return {}")
    .replace(
        """        x, hidden = self.words(now.tokens), now.states["hidden"]
        hidden = self.cell(x.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, now.tokens.shape)
        return Stepped(self.output(hidden), {"hidden": hidden})
""",
        """        x = self.words(now.tokens) + now.positions[:, None, None] * 0.1  # [B, K, 8]
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)  # [B, 2, K, 4]
        keys = now.tree.append(now.states["keys"], heads)
        values = now.tree.append(now.states["values"], heads * 2)
        past = torch.nn.functional.scaled_dot_product_attention(heads, keys, values, attn_mask=now.tree.mask)
        seen = torch.where(now.source_mask[:, None, :], x @ now.memory["read"].transpose(1, 2), -1e9).softmax(-1)
        mixed = past.transpose(1, 2).flatten(2) + seen @ now.memory["read"]
        hidden = self.cell(x.flatten(0, 1), mixed.flatten(0, 1)).unflatten(0, now.tokens.shape)
        return Stepped(self.output(hidden), {"keys": keys, "values": values})
""",
    )
    .replace("read_sequence, recurrent", "cache")
)


@pytest.mark.full
def test_a_module_with_a_cache(tmp_path: Path) -> None:
    """Attention over the past, through the tree: the same certificate, and the same engine."""
    write_module(tmp_path, CACHED)
    assert convert(tmp_path, f"{tmp_path}/model.py:build") == 0
    version = tmp_path / "repository" / "own" / "1"
    assert json.loads((version / "parity.json").read_text())["beam_exact_share"] == 1.0
    manifest = read_manifest(version)
    assert [tensor.name for tensor in manifest.tensors(StateKind.CACHE)] == ["keys", "values"]
    plans = compile_version(version)  # for TensorRT; its score graph has attention inside a loop
    assert plans["step"][0].layers["KV_CACHE_UPDATE"] == 2
    sources = [[5, 6, 7, 1], [3, 1], [4, 4, 9, 9, 9, 2, 1]]
    alone = [results(decode(make_engine(version, manifest, slots=1), [(source, BEAM)]))[0] for source in sources]
    together = results(decode(make_engine(version, manifest, slots=3), [(source, BEAM) for source in sources]))
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.hypotheses, other.hypotheses, strict=True):
            assert same_or_tie(a.tokens, a.token_log_probs, b.tokens, b.token_log_probs)


def line_of(text: str, code: str) -> int:
    return 1 + next(number for number, line in enumerate(code.splitlines()) if text in line)


def reasons(folder: Path, code: str) -> list[str]:
    """Why it is refused; and nothing was written."""
    write_module(folder, code)
    before = sorted(folder.rglob("*"))
    own = OwnFiles(folder / "weights.safetensors", folder / "source.json", folder / "target.json")
    with pytest.raises(UnsupportedCheckpoint) as caught:
        converter_for(folder / "model.py:build", own=own).convert("own", folder / "repository")
    left = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    assert left == before
    return caught.value.reasons


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        pytest.param(
            'return {"read": self.words(source)}',
            'return {"read": self.words(source)[:, 0]}',
            "encode: 'read' has shape [3, 8]; it must be [B = 3, S = 5, 8]",
            id="memory of another shape",
        ),
        pytest.param(
            'return {"read": self.words(source)}',
            'return {"red": self.words(source)}',
            "encode did not return 'read', which states() declares",
            id="memory of another name",
        ),
        pytest.param(
            'return {"hidden": memory["read"][:, 0]}',
            'return memory["read"][:, 0]',
            "initial_state returned Tensor; it must be a dict of tensors by name",
            id="no dict",
        ),
        pytest.param(
            'return {"hidden": memory["read"][:, 0]}',
            'return {"hidden": memory["read"][:, 0].double()}',
            "initial_state: 'hidden' is float64; it must be float32",
            id="another type",
        ),
        pytest.param(
            '{"hidden": hidden})',
            '{"hidden": torch.cat([hidden, hidden], dim=-1)})',
            "step: 'hidden' has shape [3, 3, 16]; it must be [B = 3, K = 3, 8]",
            id="a state that grows",
        ),
        pytest.param(
            "return Stepped(self.output(hidden), ",
            "return Stepped(self.output(hidden)[..., :9], ",
            "step: 'logits' has shape [3, 3, 9]; it must be [B = 3, K = 3, 13]",
            id="too few words",
        ),
        pytest.param(
            "return Stepped(self.output(hidden), ",
            "return Stepped(self.output(hidden) / 0, ",
            "step: 'logits' has values that are not finite",
            id="not numbers",
        ),
        pytest.param(
            "return Stepped(self.output(hidden), ",
            "return (self.output(hidden), ",
            "step returned tuple; it must be a beamline.converters.own.Stepped",
            id="not a Stepped",
        ),
        pytest.param(
            'return {"read": self.words(source)}',
            'return {"read": self.words(source) - self.words(source).mean(1, keepdim=True)}',
            "encode's 'read' depends on what stands behind a source's end: by",
            id="padding counts",
        ),
        pytest.param(
            'return {"read": self.words(source)}',
            'return {"read": self.words(source) - self.words(source).mean(0, keepdim=True) * source_mask[:, :, None]}',
            "encode's 'read' ",
            id="neighbours count",
        ),
        pytest.param(
            "return Stepped(self.output(hidden), ",
            "return Stepped(self.output(hidden - hidden.mean(1, keepdim=True)), ",
            "step 1's 'logits' for a source of 5 is not the same alone as in a batch of 3 with 3 beams (is",
            id="beams count",
        ),
        pytest.param(
            "return Stepped(self.output(hidden), ",
            "return Stepped(self.output(hidden + torch.rand(8)), ",
            "step 1's 'logits' is random: it changes from one call to the next: by",
            id="chance",
        ),
        pytest.param(
            "def initial_state",
            "def first_state",
            "it has no method 'initial_state'",
            id="a method is missing",
        ),
        pytest.param(
            'memory("read", "S", 8), ',
            'recurrent("hidden", 8), ',
            "states() declares 'hidden' twice",
            id="a name twice",
        ),
        pytest.param(
            "eos_ids=(1,)",
            "eos_ids=(13,)",
            "settings.eos_ids[0] is 13, outside the target vocabulary of 13",
            id="an id outside",
        ),
    ],
)
def test_a_module_that_breaks_the_protocol(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in BROKEN
    found = reasons(tmp_path, BROKEN.replace(old, new))
    assert found[0].startswith(reason), found
    if ": '" in reason:  # it can be said which method returned it
        method = reason.partition(":")[0].split()[0]
        assert found[0].endswith(f" (model.py, line {line_of(f'def {method}(', BROKEN)})"), found


def test_an_error_in_the_module_is_shown_with_its_line(tmp_path: Path) -> None:
    code = BROKEN.replace("x, hidden = self.words(now.tokens)", "x, hidden = self.words(now.token)")
    line = line_of("now.token)", code)
    assert reasons(tmp_path, code) == [
        f"step failed: AttributeError: 'Step' object has no attribute 'token' (model.py, line {line})"
    ]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        pytest.param(
            "        return Stepped(self.output(hidden), ",
            "        if hidden.sum() > 0:\n            hidden *= 2\n        return Stepped(self.output(hidden), ",
            "step decides by the values of a tensor",
            id="a branch",
        ),
        pytest.param(
            '        return {"read": self.words(source)}',
            "        for _ in range(int(source.max())):\n            pass\n        return {'read': self.words(source)}",
            "encode or initial_state decides by the values of a tensor",
            id="a loop",
        ),
    ],
)
def test_control_flow_that_depends_on_data(
    tmp_path: Path, old: str, new: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = BROKEN.replace(old, new)
    (found,) = reasons(tmp_path, code)
    assert capsys.readouterr() == ("", "")  # the sentence is not behind pages of what torch.export could trace
    line = line_of(new.splitlines()[0].strip(), code)
    assert found.startswith(f"{what} (model.py, line {line});"), found


def test_a_length_that_is_fixed(tmp_path: Path) -> None:
    """It works for every length that is tried first, but not in one graph for all."""
    code = BROKEN.replace(
        'return {"read": self.words(source)}',
        'return {"read": torch.stack([self.words(source[:, place]) for place in range(source.shape[1])], dim=1)}',
    )
    (found,) = reasons(tmp_path, code)
    assert found.startswith("encode or initial_state is fixed to one size of an axis that must be free"), found


def test_what_is_missing_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(tmp_path, BROKEN)
    assert main(["convert", f"{tmp_path}/model.py:build", "--name", "own"]) == 2
    assert "needs --weights FILE" in capsys.readouterr().err
    assert convert(tmp_path, f"{tmp_path}/model.py:make") == 2
    assert "has no function 'make'" in capsys.readouterr().err
    assert convert(tmp_path, f"{tmp_path}/other.py:build") == 2
    assert "other.py does not exist" in capsys.readouterr().err
    assert convert(tmp_path, str(tmp_path)) == 2
    assert "are for one's own module" in capsys.readouterr().err


def test_a_file_that_fails(tmp_path: Path) -> None:
    write_module(tmp_path, "import torch\n1 / 0\n")
    own = OwnFiles(tmp_path / "weights.safetensors", tmp_path / "source.json")
    with pytest.raises(ConversionError, match=r"failed: ZeroDivisionError: division by zero \(model.py, line 2\)"):
        converter_for(tmp_path / "model.py:build", own=own).load()


def test_files_of_one_name_are_modules_of_their_own(tmp_path: Path) -> None:
    """Tracing looks a function's globals up in the module that it says it is of."""
    code = "from torch import nn\nNAME = {!r}\nclass Own(nn.Identity):\n    pass\ndef build():\n    return Own()\n"
    modules = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_module(tmp_path / name, code.format(name))
        modules.append(build(Origin(tmp_path / name / "model.py", "build")))
    assert [vars(sys.modules[type(module).__module__])["NAME"] for module in modules] == ["one", "two"]


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    """An .npz of objects is a pickle; a state dict may name any function."""
    write_module(tmp_path, BROKEN)
    np.savez(tmp_path / "weights.npz", words=np.array([{"a": 1}], dtype=object))
    torch.save({"words.weight": Path("x")}, tmp_path / "weights.pt")
    for name in ("weights.npz", "weights.pt"):
        own = OwnFiles(tmp_path / name, tmp_path / "source.json")
        with pytest.raises(ConversionError, match="can't be read as weights"):
            converter_for(tmp_path / "model.py:build", own=own).load()


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    write_module(tmp_path, BROKEN)
    save_file({"words.weight": torch.zeros(13, 9), "extra": torch.zeros(1)}, tmp_path / "weights.safetensors")
    own = OwnFiles(tmp_path / "weights.safetensors", tmp_path / "source.json")
    with pytest.raises(UnsupportedCheckpoint) as caught:
        converter_for(tmp_path / "model.py:build", own=own).load()
    assert "extra is not a part of this architecture" in caught.value.reasons
    assert "words.weight has shape [13, 9], but its configuration says [13, 8]" in caught.value.reasons
