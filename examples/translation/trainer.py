"""The training loop and what it needs to go on after an interruption as if there had been none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import sentencepiece
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from examples.translation.average import Average
from examples.translation.data import PAD, Batch, Corpus, read_lines
from examples.translation.dropout import use_byte_dropout
from examples.translation.evaluate import Scores, quality_of, score, translate
from examples.translation.loss import projected_loss
from examples.translation.models import VOCABULARY, Model, export, hidden_states, load_weights, weights_of
from examples.translation.settings import Settings

STATE, LOG, PAUSE = "state.pt", "log.jsonl", "PAUSE"
# without tqdm's own estimate of the time left, which knows nothing of max_minutes
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps, {elapsed}{postfix}"


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0  # target tokens trained on
    seconds: float = 0.0  # spent in training steps: no validation, no pauses, over all resumed runs
    epoch: int = 0
    batch: int = 0  # within the epoch
    validated: int = -1  # the step of the last validation


class Meter:
    """Loss and speed since the last log line."""

    def __init__(self) -> None:
        self.loss, self.nll, self.tokens, self.seconds = 0.0, 0.0, 0, 0.0

    def add(self, loss: float, nll: float, tokens: int, seconds: float) -> None:
        self.loss, self.nll = self.loss + loss, self.nll + nll
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds

    def describe(self) -> str:
        return f"loss {self.loss / self.tokens:.3f}, {self.tokens / self.seconds:.0f} tokens/s"

    def report(self) -> dict[str, float]:
        return {
            "train_loss": round(self.loss / max(1, self.tokens), 4),
            "train_nll": round(self.nll / max(1, self.tokens), 4),
            "tokens_per_second": round(self.tokens / max(1e-9, self.seconds), 1),
        }


class Trainer:
    def __init__(
        self,
        settings: Settings,
        model: Model,
        vocabulary: sentencepiece.SentencePieceProcessor,
        data: Path,
        out: Path,
    ) -> None:
        self.settings, self.model, self.vocabulary, self.out = settings, model, vocabulary, out
        self.progress = Progress()
        use_byte_dropout(model)
        self.average = Average(model, settings.average_decay)
        self.optimiser = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        cache, room = out / "cache", model.config.max_positions
        self.train_set = Corpus.load(data, "train", settings, vocabulary, cache, room)
        self.valid_set = Corpus.load(data, "valid", settings, vocabulary, cache, room)
        self.samples = {
            name: [
                read_lines(data / f"{name}.{side}")[: settings.bleu_lines]
                for side in (settings.source, settings.target)
            ]
            for name in ("valid", *settings.also_validate)
        }
        self.stopping = Event()

    def stop(self) -> None:
        """From a signal handler: save after the step under way, and return."""
        self.stopping.set()

    # -- state on disk

    def save(self) -> None:
        state = {
            "model": weights_of(self.model),
            "average": self.average.weights,
            "average_updates": self.average.updates,
            "optimiser": self.optimiser.state_dict(),
            "progress": asdict(self.progress),
            "random": torch.get_rng_state(),
        }
        partial = self.out / f"{STATE}.tmp"
        torch.save(state, partial)
        partial.replace(self.out / STATE)

    def resume(self) -> None:
        state: dict[str, Any] = torch.load(self.out / STATE, weights_only=True)
        load_weights(self.model, state["model"])
        self.average.weights = state["average"]
        self.average.updates = state["average_updates"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])
        self._forget_lost_steps()

    def _forget_lost_steps(self) -> None:
        """A killed run logged steps after its last save; they are trained again and logged again."""
        log = self.out / LOG
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
        partial = log.with_suffix(".tmp")
        kept = [line for line in lines if json.loads(line)["step"] <= self.progress.step]
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(log)

    def log(self, **entry: Any) -> None:
        line = {
            "seconds": round(self.progress.seconds, 1),
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            **entry,
        }
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        tqdm.write(" ".join(f"{key} {value}" for key, value in line.items()))

    # -- training

    def batches(self) -> Iterator[Batch]:
        """From where the run stands, for ever."""
        while True:
            empty = True
            for batch in self.train_set.epoch(self.progress.epoch, self.settings, skip=self.progress.batch):
                empty = False
                self.progress.batch += 1
                yield batch
            if empty and self.progress.batch == 0:
                raise ValueError("the training text holds no pair that fits the model")
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """Summed smoothed loss and nll of the batch."""
        rate = self.settings.rate(self.progress.step + 1)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        with sdpa_kernel(SDPBackend.MATH):  # sentences are short: PyTorch's fused kernel takes three times as long
            memory = self.model.encode(batch.source, batch.source_mask)
            hidden = hidden_states(self.model, memory, batch.source_mask, batch.target)
        real = batch.labels != PAD  # the vocabulary is wide: no logits for padding
        sums = projected_loss(hidden[real], self.model.output, batch.labels[real], self.settings.label_smoothing)
        (sums.smoothed / batch.tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.average.update(self.model)
        self.progress.step += 1
        self.progress.tokens += batch.tokens
        return sums.smoothed.item(), sums.nll.item()

    def validate(self) -> Scores:
        with self.average.in_place_of(self.model):
            batches = self.valid_set.in_order(self.settings.batch_tokens)
            scores = score(self.model, self.vocabulary, batches, *self.samples["valid"])
            others = {}
            for name in self.settings.also_validate:
                sources, references = self.samples[name]
                found = quality_of(translate(self.model, self.vocabulary, sources), references)
                others[name] = {"bleu": round(found.bleu, 4), "chrf": round(found.chrf, 4)}
        vocabulary, served = self.out / VOCABULARY, self.settings.served()
        export(self.out / "checkpoint", self.model, self.average.weights, vocabulary, served)
        halves = {name: tensor.half() for name, tensor in self.average.weights.items()}
        export(self.out / "checkpoint-fp16", self.model, halves, vocabulary, served)
        self.progress.validated = self.progress.step
        self.log(lr=self.settings.rate(self.progress.step), **scores.to_json(), **others)
        return scores

    def wait_while_paused(self) -> None:
        if not (self.out / PAUSE).exists():
            return
        self.save()
        tqdm.write(f"paused at step {self.progress.step}, until {self.out / PAUSE} is gone")
        while (self.out / PAUSE).exists() and not self.stopping.wait(1.0):
            pass

    def run(self, max_minutes: float | None = None) -> None:
        """Until max_steps, max_minutes of wall time or stop(), whichever comes first."""
        settings, progress = self.settings, self.progress
        begin = saved = time.monotonic()
        deadline = begin + 60 * max_minutes if max_minutes is not None else float("inf")
        self.model.train()
        if progress.step == 0:
            self.validate()  # a run that goes on from other weights shows where it starts
        meter = Meter()
        batches = self.batches()
        with tqdm(total=settings.max_steps, initial=progress.step, disable=None, bar_format=BAR) as bar:
            while progress.step < settings.max_steps and time.monotonic() < deadline:
                self.wait_while_paused()
                if self.stopping.is_set():
                    break
                started = time.monotonic()
                batch = next(batches)
                loss, nll = self.train_step(batch)
                spent = time.monotonic() - started
                progress.seconds += spent
                meter.add(loss, nll, batch.tokens, spent)
                bar.update()
                per_step = progress.seconds / progress.step
                left = min(per_step * (settings.max_steps - progress.step), deadline - time.monotonic())
                bar.set_postfix_str(f"{meter.describe()}, {tqdm.format_interval(max(0.0, left))} left")
                if progress.step % settings.log_every == 0:
                    self.log(epoch=progress.epoch, lr=settings.rate(progress.step), **meter.report())
                    meter = Meter()
                if progress.step % settings.validate_every == 0:
                    self.validate()
                if time.monotonic() - saved > 60 * settings.save_every_minutes:
                    self.save()
                    saved = time.monotonic()
        if progress.validated != progress.step and not self.stopping.is_set():
            self.validate()
        self.save()
