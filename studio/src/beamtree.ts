// A trace of the search as a tree that can be drawn: no pixels and no DOM here.
import type { End, Fate, Step, Trace } from "./api.ts";

export interface Node {
  step: number; place: number; parent: Node | null; children: Node[];
  piece: string | undefined; score: number; normalized: number; logProb: number; fate: Fate; finishReason?: string;
  row: number; // among the rows of its column
  rank: number; // of a hypothesis in the answer, from 1 on; 0: it is none
  answer: boolean; // on the way to the best hypothesis
}
export interface Tree { columns: Node[][]; rows: number; samples: boolean; beams: number; penalty: number }

/** Every candidate of every step. Columns are ordered as their parents are, so that no two branches cross. */
export function treeOf(steps: Step[], trace?: Trace, hidePruned = false): Tree {
  const rows = Math.max(1, ...steps.map((step) => step.candidates.filter((each) => !hidePruned || each.fate !== "SEARCH_FATE_PRUNED").length));
  const columns: Node[][] = [];
  const places: Node[][] = []; // by step and place, whatever is hidden
  for (const [number, step] of steps.entries()) {
    const before = places[number - 1];
    const nodes = step.candidates.map((each, place): Node => {
      const parent = before?.[each.parent ?? 0] ?? null;
      const score = each.score ?? 0;
      return {
        step: number, place, parent, children: [], piece: each.piece, score, normalized: each.normalized_score ?? 0,
        logProb: score - (parent?.score ?? 0), fate: each.fate, finishReason: each.finish_reason, row: 0, rank: 0, answer: false,
      };
    });
    places.push(nodes);
    const shown = hidePruned ? nodes.filter((node) => node.fate !== "SEARCH_FATE_PRUNED") : nodes;
    for (const node of shown) node.parent?.children.push(node);
    const ordered = [...shown].sort((a, b) => (a.parent?.row ?? 0) - (b.parent?.row ?? 0) || a.place - b.place);
    if (trace?.samples) for (const node of ordered) node.row = node.parent ? node.parent.row : node.place;
    else place(ordered, rows);
    columns.push(ordered);
  }
  ends(trace?.hypotheses ?? [], places, !trace?.samples);
  return { columns, rows, samples: !!trace?.samples, beams: trace?.beam_size ?? 0, penalty: trace?.length_penalty ?? 0 };
}

/** As near to its parent's row as the order and the number of rows allow, so that branches run straight. */
function place(ordered: Node[], rows: number) {
  let next = 0;
  for (const node of ordered) next = (node.row = Math.max(next, node.parent?.row ?? next)) + 1;
  let highest = rows;
  for (const node of ordered.toReversed()) highest = node.row = Math.min(node.row, highest - 1);
}

function ends(hypotheses: End[], places: Node[][], marked: boolean) {
  hypotheses.forEach((end, index) => {
    const last = places[end.step ?? 0]?.[end.candidate ?? 0];
    if (!last) return;
    last.rank = index + 1;
    if (index === 0 && marked) for (let node: Node | null = last; node; node = node.parent) node.answer = true;
  });
}

export function pathOf(node: Node): Node[] {
  const found: Node[] = [];
  for (let each: Node | null = node; each; each = each.parent) found.push(each);
  return found.reverse();
}

/** The candidates that still matter after a step: what lives, what has finished, and all that they come from. */
export function alive(tree: Tree, step: number): Set<Node> {
  const found = new Set<Node>();
  const add = (node: Node | null) => { for (; node && !found.has(node); node = node.parent) found.add(node); };
  tree.columns.slice(0, step + 1).forEach((column, number) => column.forEach((node) => {
    if (node.fate === "SEARCH_FATE_FINISHED" || (number === step && node.fate === "SEARCH_FATE_LIVE")) add(node);
  }));
  return found;
}

export interface Standing { node: Node; rank: number; rankBySum: number }

/** Finished and living hypotheses after a step, by normalised score, each with its rank by the bare sum. */
export function standings(tree: Tree, step: number): Standing[] {
  const finished: Node[] = [];
  for (const column of tree.columns.slice(0, step + 1)) finished.push(...column.filter((node) => node.fate === "SEARCH_FATE_FINISHED"));
  const living = (tree.columns[step] ?? []).filter((node) => node.fate === "SEARCH_FATE_LIVE");
  const kept = finished.sort((a, b) => b.normalized - a.normalized).slice(0, Math.max(1, tree.beams));
  const all = [...kept, ...living];
  const bySum = [...all].sort((a, b) => b.score - a.score);
  return all.sort((a, b) => b.normalized - a.normalized)
    .map((node, index) => ({ node, rank: index + 1, rankBySum: bySum.indexOf(node) + 1 }));
}
