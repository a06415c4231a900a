"""Text as its UTF-8 bytes: the tokenizer of the fake model, whose echo is then the text itself."""

from __future__ import annotations

from collections.abc import Sequence

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_FIRST_BYTE = 3
_SPECIAL = ("<pad>", "<s>", "</s>")


class ByteTokenizer:
    vocab_size = _FIRST_BYTE + 256

    def encode(self, text: str) -> list[int]:
        return [*self.encode_prefix(text), EOS_ID]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_prefix(self, text: str) -> list[int]:
        return [byte + _FIRST_BYTE for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        """A beam may well cut a character in two, so broken ones are replaced, as every tokenizer does."""
        return bytes(i - _FIRST_BYTE for i in ids if i >= _FIRST_BYTE).decode("utf-8", errors="replace")

    def token(self, token_id: int) -> str:
        if token_id < _FIRST_BYTE:
            return _SPECIAL[token_id]
        byte = token_id - _FIRST_BYTE
        return chr(byte) if 0x20 < byte < 0x7F else f"<0x{byte:02X}>"
