// Token pieces as people read them.
import type { Token } from "./api.ts";

const SPACES = /^[▁Ġ ]/;

/** Whether a piece begins a word. */
export const beginsWord = (piece: string) => SPACES.test(piece) || /^[Ċ\n]/.test(piece);

/** Bytes that byte-level vocabularies spell as other letters, in the little that a label needs. */
export function readable(piece: string): string {
  const byte = /^<0x([2-7][0-9A-F])>$/i.exec(piece); // a byte that is a character by itself
  if (byte) return String.fromCharCode(parseInt(byte[1]!, 16));
  return piece.replaceAll("▁", " ").replaceAll("Ġ", " ").replaceAll("Ċ", "⏎").replaceAll("\n", "⏎");
}

export const isEnd = (piece: string) => /^<\/s>$|^<\|.*end.*\|>$|^<eos>$|^<\|im_end\|>$/i.test(piece);

/** A token that names a language, as NLLB, mBART, M2M100, MADLAD and Marian write them: no word of the text. */
export const isLanguage = (piece: string) => /^([a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2}|__[a-z]{2,3}__|<2[A-Za-z_]+>|>>[A-Za-z_]+<<)$/.test(piece);

/** A short label: what begins a word stands as it is, what continues one begins with a dot. */
export function label(piece: string | undefined, first = false): string {
  if (piece === undefined || piece === "") return "∎";
  if (isEnd(piece)) return "end";
  if (isLanguage(piece)) return piece;
  const text = readable(piece);
  const trimmed = text.trim();
  if (trimmed === "") return "␣";
  return first || beginsWord(piece) || /^[\p{P}\p{S}]/u.test(trimmed) ? trimmed : `·${trimmed}`;
}

export interface Word { text: string; first: number; last: number }

/** Tokens put together to words; end tokens are none. */
export function words(tokens: Token[]): Word[] {
  const found: Word[] = [];
  tokens.forEach((token, index) => {
    const piece = token.piece ?? "";
    if (isEnd(piece) || isLanguage(piece) || piece === "<pad>") return;
    const text = readable(piece);
    const current = found.at(-1);
    const joins = current && !beginsWord(piece) && !/^[\s]/.test(text);
    if (joins) { current.text += text; current.last = index; }
    else found.push({ text: text.trimStart(), first: index, last: index });
  });
  return found.filter((word) => word.text !== "");
}
