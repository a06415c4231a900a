import assert from "node:assert/strict";
import { test } from "node:test";
import type { Candidate, Step, Trace } from "../src/api.ts";
import { alive, pathOf, standings, treeOf } from "../src/beamtree.ts";
import { named, tagOf } from "../src/languages.tsx";
import { isLanguage, label, words } from "../src/pieces.ts";

const candidate = (piece: string, parent: number, score: number, length: number, fate: "LIVE" | "PRUNED" | "FINISHED"): Candidate =>
  ({ id: 1, piece, parent, score, normalized_score: score / length, fate: `SEARCH_FATE_${fate}` });

const STEPS: Step[] = [
  { candidates: [candidate("▁a", 0, -1, 1, "LIVE"), candidate("▁b", 0, -2, 1, "LIVE"), candidate("▁c", 0, -3, 1, "PRUNED")] },
  { candidates: [candidate("▁d", 1, -2.2, 2, "LIVE"), candidate("</s>", 0, -2.3, 2, "FINISHED"), candidate("▁e", 0, -2.4, 2, "LIVE")] },
  { candidates: [candidate("</s>", 0, -2.6, 3, "FINISHED"), candidate("▁f", 0, -3, 3, "LIVE")] },
];
const TRACE: Trace = { beam_size: 2, length_penalty: 1, hypotheses: [{ step: 2, candidate: 0 }, { step: 1, candidate: 1 }] };

test("every candidate is drawn once, under its parent, and no branches cross", () => {
  const tree = treeOf(STEPS, TRACE);
  assert.deepEqual(tree.columns.map((column) => column.length), [3, 3, 2]);
  for (const column of tree.columns) {
    const rows = column.map((node) => node.row);
    assert.deepEqual(rows, [...new Set(rows)].sort((a, b) => a - b));
    const parents = column.map((node) => node.parent?.row ?? 0);
    assert.deepEqual(parents, [...parents].sort((a, b) => a - b));
    assert.ok(Math.max(...rows) < tree.rows);
  }
  assert.deepEqual(tree.columns.flat().filter((node) => node.answer).map((node) => node.piece), ["▁b", "▁d", "</s>"]);
  assert.deepEqual(tree.columns[2]!.filter((node) => node.rank === 1).map((node) => pathOf(node).map((each) => each.piece).join("")), ["▁b▁d</s>"]);
});

test("pruned ones can be left out", () => {
  assert.deepEqual(treeOf(STEPS, TRACE, true).columns.map((column) => column.length), [2, 3, 2]);
});

test("what lives after a step is what can still be reached", () => {
  const tree = treeOf(STEPS, TRACE);
  assert.deepEqual([...alive(tree, 1)].map((node) => node.piece).sort(), ["</s>", "▁a", "▁b", "▁d", "▁e"]);
  assert.ok(![...alive(tree, 2)].some((node) => node.piece === "▁e"));
});

test("the length penalty moves hypotheses, and the standings say how far", () => {
  const ranked = standings(treeOf(STEPS, TRACE), 2);
  assert.deepEqual(ranked.map((each) => [each.node.score, each.rank, each.rankBySum]), [[-2.6, 1, 2], [-3, 2, 3], [-2.3, 3, 1]]);
});

test("samples keep their rows", () => {
  const steps: Step[] = [
    { candidates: [candidate("x", 0, -1, 1, "LIVE"), candidate("y", 0, -1, 1, "FINISHED"), candidate("z", 0, -1, 1, "LIVE")] },
    { candidates: [candidate("x", 0, -2, 2, "FINISHED"), candidate("z", 2, -2, 2, "FINISHED")] },
  ];
  assert.deepEqual(treeOf(steps, { beam_size: 3, samples: true }).columns[1]!.map((node) => node.row), [0, 2]);
});

test("pieces become words", () => {
  const tokens = ["▁Die", "▁Datei", "en", ".", "</s>"].map((piece) => ({ piece }));
  assert.deepEqual(words(tokens).map((word) => [word.text, word.first, word.last]), [["Die", 0, 0], ["Dateien.", 1, 3]]);
  assert.deepEqual(["▁Die", "en", ".", "</s>", "<0x20>", undefined].map((piece) => label(piece)), ["Die", "·en", ".", "end", "␣", "∎"]);
});

test("a language's token is no word, and is read as it stands", () => {
  const tokens = ["deu_Latn", "▁Guten", "▁Tag", "</s>"].map((piece) => ({ piece }));
  assert.deepEqual(words(tokens), [{ text: "Guten", first: 1, last: 1 }, { text: "Tag", first: 2, last: 2 }]);
  for (const piece of ["deu_Latn", "de_DE", "__de__", "<2zh_Hant>", ">>deu<<"]) assert.ok(isLanguage(piece), piece);
  for (const piece of ["▁de_DE", "de", "_", "a_b", "__init__", "<2", "<<"]) assert.equal(isLanguage(piece), false, piece);
  assert.equal(label("deu_Latn"), "deu_Latn");
});

test("languages are named by their standard tags, and two of one name by their codes", () => {
  const model = { name: "m", version: "1", task: "translate", language_tags: { deu_Latn: "de", zho_Hans: "zh-Hans" } } as const;
  assert.equal(tagOf(model, "deu_Latn"), "de");
  assert.deepEqual(named(model, ["zho_Hans", "deu_Latn", "de", "not a tag"]).map((each) => each.name), ["German, de", "German, deu_Latn", "Simplified Chinese", "not a tag"]);
});
