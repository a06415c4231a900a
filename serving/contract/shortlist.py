"""Which words a translation may need: a lexical table that `beamline shortlist` makes from parallel text.

The file is a NumPy archive without objects, beside the graphs of a version, named in its manifest:

    tokenizers   the hashes of the source's and the target's tokenizer that the ids below belong to
    always       [F]: words that every translation may need
    offsets      [source words + 1], and
    words        [offsets[-1]]: what a source word w may be translated with is words[offsets[w] : offsets[w + 1]]
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.files import open_regular
from beamline.serving.contract.manifest import Manifest, Vocabulary
from beamline.serving.errors import ModelError

Flags = NDArray[np.bool_]
_REMEDY = "make it anew with beamline shortlist"


@dataclass(frozen=True)
class Lexicon:
    tokenizers: tuple[str, str]
    always: NDArray[np.int32]
    offsets: NDArray[np.int64]
    words: NDArray[np.int32]

    def allowed(self, source: Sequence[int], wanted: Sequence[int], vocabulary: int) -> Flags:
        """[vocabulary]: what one request may say. `wanted`: words that it names itself."""
        flags = np.zeros(vocabulary, np.bool_)
        flags[self.always] = True
        for word in set(source):
            flags[self.words[self.offsets[word] : self.offsets[word + 1]]] = True
        flags[list(wanted)] = True
        return flags

    def save(self, file: BinaryIO) -> None:
        np.savez_compressed(
            file,
            tokenizers=np.array(self.tokenizers),
            always=self.always,
            offsets=self.offsets,
            words=self.words,
        )


def load_lexicon(folder: Path, manifest: Manifest) -> Lexicon:
    """That of a version, or a `ModelError` that says why it is none."""
    file = manifest.shortlist
    if file is None:
        raise ModelError(f"{folder} has no shortlist: make one with beamline shortlist")
    path = folder / file.file
    try:
        with open_regular(path) as content, np.load(content, allow_pickle=False) as archive:
            source, target = archive["tokenizers"].tolist()
            always = archive["always"].astype(np.int32, casting="same_kind")
            offsets = archive["offsets"].astype(np.int64, casting="safe")
            words = archive["words"].astype(np.int32, casting="same_kind")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} is not a shortlist ({error}); {_REMEDY}") from error
    if (source, target) != (manifest.tokenizers.source.sha256, manifest.tokenizers.target.sha256):
        raise ModelError(f"{path} was made for other tokenizers than those of this version; {_REMEDY}")
    sizes = manifest.vocabulary
    if offsets.shape != (sizes.source_size + 1,) or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise ModelError(f"{path} is not for the {sizes.source_size} source words of this version; {_REMEDY}")
    if words.shape != (offsets[-1],) or always.ndim != 1 or any(_outside(part, sizes) for part in (always, words)):
        raise ModelError(f"{path} names words outside the vocabulary of {sizes.target_size}; {_REMEDY}")
    return Lexicon((str(source), str(target)), always, offsets, words)


def _outside(words: NDArray[np.int32], sizes: Vocabulary) -> bool:
    return bool(len(words) and (words.min() < 0 or words.max() >= sizes.target_size))
