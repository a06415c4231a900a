"""Lines of text that a command is given."""

from __future__ import annotations

from pathlib import Path

from beamline.serving.errors import ConversionError


def read_lines(path: Path) -> list[str]:
    """Only a line feed ends a line: where two files belong together, other separators are text."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return [line.rstrip("\r\n") for line in file]
    except OSError as error:
        raise ConversionError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8: {error}") from error
