"""`beamline shortlist`: a lexical table for a version that stands in a repository."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from beamline.converters.checkpoints.text_lines import read_lines
from beamline.converters.version.folder import add_version_arguments, version_folder

HELP = "learn from parallel text which words a translation may need, for faster decoding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument("--source", type=Path, required=True, metavar="F", help="lines in the source language")
    parser.add_argument("--target", type=Path, required=True, metavar="F", help="their translations, line by line")
    parser.add_argument(
        "--best", type=int, default=100, metavar="N", help="translations of a source word (%(default)s)"
    )
    parser.add_argument(
        "--frequent", type=int, default=100, metavar="N", help="words that are always there (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of learning (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from beamline.converters.shortlist.lexicon import Wanted, add_to_version, make_lexicon, tokenised
    from beamline.serving.contract.manifest import read_manifest
    from beamline.serving.errors import ConversionError

    if min(arguments.best, arguments.frequent, arguments.rounds) < 1:
        raise ConversionError("--best, --frequent and --rounds are whole numbers from 1 on")
    folder = version_folder(arguments.repo, arguments.model)
    manifest = read_manifest(folder)
    if manifest.task != "translate" or manifest.feature_width:
        raise ConversionError(f"{manifest.name} does not translate text: a shortlist depends on the words of a source")
    source, target = read_lines(arguments.source), read_lines(arguments.target)
    if len(source) != len(target):
        raise ConversionError(
            f"{arguments.source} has {len(source)} lines, {arguments.target} has {len(target)}; they must go together"
        )
    total = len(source) * (1 + arguments.rounds)
    with tqdm(total=total, unit="line", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:

        def advance(lines: int) -> None:
            bar.update(lines)

        pairs = tokenised(folder, manifest, source, target, advance)
        wanted = Wanted(arguments.best, arguments.frequent, arguments.rounds)
        lexicon = make_lexicon(folder, manifest, pairs, wanted, advance)
    add_to_version(folder, manifest, lexicon)
    known = (lexicon.offsets[1:] > lexicon.offsets[:-1]).sum()
    print(f"{folder}: {len(pairs.source):,} of {len(source):,} pairs; {known:,} source words have translations,")
    print(f"  {len(lexicon.words) / max(1, known):.0f} each; {len(lexicon.always):,} words are always there")
    print(f"serve it with `shortlist = true` in {folder.parent / 'serving.toml'}")
    return 0
