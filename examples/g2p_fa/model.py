"""The model of the PyPI package g2p-fa: two LSTMs, whose weights are stored by torch's own names."""

from torch import Tensor, nn

from beamline.converters.own import Settings, Step, Stepped, read_sequence, recurrent

LONGEST, LAYERS, WIDTH, STATES = 30, 2, 256, ("hidden", "cell")


class G2pFa(nn.Module):
    settings = Settings(
        source_vocab_size=41, target_vocab_size=33, max_source_length=LONGEST, max_target_length=LONGEST,
        pad_id=0, eos_ids=(2,), decoder_start_id=1, decoding={"beam_size": 1},
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        rnn = [nn.LSTM(40, WIDTH, LAYERS, batch_first=True) for _ in STATES]
        self.encoder = nn.ModuleDict({"embedding": nn.Embedding(41, 40), "rnn": rnn[0]})
        self.decoder = nn.ModuleDict({"embedding": nn.Embedding(33, 40), "rnn": rnn[1], "fc_out": nn.Linear(WIDTH, 33)})

    def states(self) -> list[object]:
        return [recurrent(name, LAYERS, WIDTH) for name in STATES]

    def encode(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        # The package reads every word up to 30 places, padding and all: so it was trained.
        letters = nn.functional.pad(source * source_mask, (0, LONGEST))[:, :LONGEST]
        x = self.encoder["embedding"](letters)
        _, last = read_sequence(self.encoder["rnn"], x, letters >= 0)  # type: ignore[arg-type]
        return dict(zip(STATES, last, strict=True))

    def initial_state(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return memory

    def step(self, now: Step) -> Stepped:
        before = tuple(now.states[name].flatten(0, 1).transpose(0, 1) for name in STATES)
        output, after = self.decoder["rnn"](self.decoder["embedding"](now.tokens.flatten()[:, None]), before)
        found = [each.unflatten(0, now.tokens.shape) for each in (output[:, 0], *(s.transpose(0, 1) for s in after))]
        return Stepped(self.decoder["fc_out"](found[0]), dict(zip(STATES, found[1:], strict=True)))
