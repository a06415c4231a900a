"""The grapheme-to-phoneme model of the PyPI package g2p-en: a foreign checkpoint, read by its own names.

The package brings its weights as arrays (`checkpoint20.npz`) and computes with numpy. Here is the same network in
PyTorch: a GRU reads the letters, another one writes the phonemes, beginning with the first one's last state.
"""

from __future__ import annotations

from torch import Tensor, nn

from beamline.converters.own import Settings, Step, Stepped, read_sequence, recurrent

LETTERS, PHONEMES, WIDTH = 29, 74, 256
LONGEST = 20  # phonemes; the package stops there, too
_GRU = ("w_ih", "w_hh", "b_ih", "b_hh")
_TORCH = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class G2p(nn.Module):
    settings = Settings(
        source_vocab_size=LETTERS,
        target_vocab_size=PHONEMES,
        pad_id=0,
        eos_ids=(3,),
        decoder_start_id=2,
        max_source_length=64,
        max_target_length=1 + LONGEST,
        decoding={"beam_size": 1},  # the package knows no other
        weight_names={
            "enc_emb": "letters.weight",
            "dec_emb": "phonemes.weight",
            "fc_w": "output.weight",
            "fc_b": "output.bias",
            **{f"enc_{theirs}": f"reader.{ours}_l0" for theirs, ours in zip(_GRU, _TORCH, strict=True)},
            **{f"dec_{theirs}": f"writer.{ours}" for theirs, ours in zip(_GRU, _TORCH, strict=True)},
        },
        description="English spelling to ARPAbet phonemes (g2p-en 2.1, Apache-2.0).",
    )

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.phonemes = nn.Embedding(PHONEMES, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.writer = nn.GRUCell(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, PHONEMES)

    def states(self) -> list[object]:
        return [recurrent("hidden", WIDTH)]

    def encode(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        _, (last,) = read_sequence(self.reader, self.letters(source), source_mask)
        return {"word": last[:, 0]}

    def initial_state(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": memory["word"]}

    def step(self, now: Step) -> Stepped:
        x, hidden = self.phonemes(now.tokens), now.states["hidden"]
        # A cell knows one batch axis: requests and beams together.
        hidden = self.writer(x.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, now.tokens.shape)
        return Stepped(self.output(hidden), {"hidden": hidden})


def build() -> nn.Module:
    return G2p()
