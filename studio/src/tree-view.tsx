// The beam tree: grows while it decodes, and can be scrubbed through afterwards.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Step, Trace } from "./api.ts";
import { alive, pathOf, standings, treeOf, type Node } from "./beamtree.ts";
import { isEnd, isLanguage, label, readable } from "./pieces.ts";
import { Card, Downloads, fixed, percent } from "./ui.tsx";

const FATES: Record<string, string> = {
  SEARCH_FATE_LIVE: "goes on", SEARCH_FATE_PRUNED: "pruned", SEARCH_FATE_FINISHED: "finished",
};
const LEFT = 14, TOP = 28, AROUND = 3; // columns that are drawn beyond what is seen

function look(rows: number) {
  if (rows <= 8) return { row: 38, column: 104, scores: true };
  if (rows <= 16) return { row: 25, column: 100, scores: false };
  return { row: 19, column: 92, scores: false };
}

const textOf = (node: Node) => pathOf(node).map((each) => each.piece ?? "").filter((piece) => !isEnd(piece) && !isLanguage(piece)).map(readable).join("").trim();

export function BeamTree({ steps, trace, running }: { steps: Step[]; trace?: Trace; running: boolean }) {
  const beams = trace?.beam_size ?? Math.max(1, ...steps.map((step) => step.candidates.filter((each) => each.fate === "SEARCH_FATE_LIVE").length));
  const [pruned, setPruned] = useState<boolean | null>(null);
  const showPruned = pruned ?? beams <= 5;
  const tree = useMemo(() => treeOf(steps, trace, !showPruned), [steps, steps.length, trace, showPruned]);
  const [chosen, setChosen] = useState<number | null>(null); // null: the newest
  const [picked, setPicked] = useState<Node | null>(null);
  const [seen, setSeen] = useState({ from: 0, to: 30 });
  const box = useRef<HTMLDivElement>(null);
  const svg = useRef<SVGSVGElement>(null);
  const last = tree.columns.length - 1;
  const step = Math.min(chosen ?? last, last);
  const { row, column, scores } = look(tree.rows);
  const width = LEFT + Math.max(1, tree.columns.length) * column + 16;
  const height = TOP + tree.rows * row + 10;
  const living = useMemo(() => alive(tree, step), [tree, step]);
  const ranked = useMemo(() => standings(tree, step), [tree, step]);

  useEffect(() => { setPicked(null); if (running) setChosen(null); }, [steps, running]);
  useEffect(() => { // what was chosen, or is newest, is in sight
    const element = box.current;
    if (!element) return;
    const x = LEFT + step * column;
    if (x + column > element.scrollLeft + element.clientWidth) element.scrollLeft = x + 1.5 * column - element.clientWidth;
    else if (x < element.scrollLeft) element.scrollLeft = Math.max(0, x - column);
    look_again();
  }, [step, column, tree]);
  const look_again = () => {
    const element = box.current;
    if (!element) return;
    const from = Math.floor(element.scrollLeft / column) - AROUND;
    const to = Math.ceil((element.scrollLeft + element.clientWidth) / column) + AROUND;
    setSeen((old) => (old.from === from && old.to === to ? old : { from, to }));
  };

  const x = (node: Node) => LEFT + node.step * column;
  const y = (node: Node) => TOP + node.row * row + row / 2;
  const nodes = tree.columns.slice(Math.max(0, seen.from), seen.to + 1).flat().filter((node) => node.step <= step);
  const end = (node: Node) => x(node) + column - 25;
  const over = !running && !!trace?.hypotheses?.length && step === last;
  const stateOf = (node: Node) => (over && node.fate === "SEARCH_FATE_LIVE" ? "not finished" : FATES[node.fate]);
  const way = new Set(picked ? pathOf(picked) : []);

  const kind = (node: Node) => [
    "node",
    node.fate === "SEARCH_FATE_PRUNED" ? "pruned" : node.fate === "SEARCH_FATE_FINISHED" ? "finished" : living.has(node) ? "live" : "dead",
    node.answer ? "answer" : "", node.rank ? "ranked" : "", way.has(node) ? "picked" : "",
  ].join(" ");

  return (
    <Card id="beam-tree" title={trace?.samples ? "Samples" : "Beam tree"}
      hint={trace?.samples ? "Each row is a sample: the tokens it drew, the line as thick as they were likely."
        : "Every step’s candidates, best first from top to bottom within a branch. A line is as thick as its token was likely."}
      tools={<>
        {!trace?.samples && <label class="check"><input type="checkbox" checked={showPruned} onChange={(event) => setPruned(event.currentTarget.checked)} /> pruned</label>}
        <Downloads svg={() => svg.current} name="beam-tree" />
      </>}>
      <div class="legend" aria-hidden="true">
        <span><i class="dot live" />live</span>{!trace?.samples && <span><i class="dot dead" />died later</span>}
        {showPruned && !trace?.samples && <span><i class="dot pruned" />pruned</span>}<span><i class="dot finished" />finished</span>{!trace?.samples && <span><i class="dot answer" />the answer</span>}
      </div>
      <div class="scroll" ref={box} onScroll={look_again} tabIndex={0} role="group" aria-label="The drawing; the table below says the same">
        <svg ref={svg} class="tree" viewBox={`0 0 ${width} ${height}`} width={width} height={height} role="img"
          aria-label={`${tree.columns.length} steps, ${tree.beams} ${trace?.samples ? "samples" : "beams"}`} data-steps={tree.columns.length}>
          {step >= 0 && <rect class="now" x={LEFT + step * column - 4} y={4} width={column - 6} height={height - 8} rx={6} />}
          {tree.columns.slice(Math.max(0, seen.from), seen.to + 1).map((nodes) => nodes[0] && nodes[0].step <= step && (
            <text key={nodes[0].step} class="number" x={x(nodes[0]) + 4} y={18}>{nodes[0].step + 1}</text>
          ))}
          {nodes.map((node) => node.parent && (
            <path key={`e${node.step}-${node.place}`} class={kind(node).replace("node", "edge")}
              stroke-width={(0.8 + 3.4 * Math.min(1, Math.exp(node.logProb))).toFixed(2)}
              d={`M${end(node.parent)} ${y(node.parent)}C${end(node.parent) + 14} ${y(node.parent)} ${x(node) - 16} ${y(node)} ${x(node) - 2} ${y(node)}`} />
          ))}
          {nodes.map((node) => (
            <g key={`n${node.step}-${node.place}`} class={kind(node)} onClick={() => { setPicked(node); }} onMouseEnter={() => setPicked(node)}
              data-step={node.step} data-place={node.place} data-score={node.score} data-fate={node.fate}>
              <title>{`${textOf(node)}\nsum ${fixed(node.score)}, normalised ${fixed(node.normalized)}, token ${percent(Math.exp(node.logProb))}`}</title>
              <rect x={x(node) - 3} y={y(node) - row / 2 + 2} width={column - 21} height={row - 4} rx={5} />
              <text class="piece" x={x(node) + 5} y={y(node) + (scores ? -3 : 4)}>{shorten(label(node.piece, node.step === 0), scores ? 10 : 9)}</text>
              {scores && <text class="score" x={x(node) + 5} y={y(node) + 11}>{fixed(node.score, 2)}{node.rank ? ` · ${node.rank}.` : ""}</text>}
            </g>
          ))}
        </svg>
      </div>
      {last >= 0 && (
        <div class="scrub">
          <button type="button" class="quiet" aria-label="one step back" onClick={() => setChosen(Math.max(0, step - 1))}>◀</button>
          <input type="range" aria-label="step" min={0} max={last} value={step} onInput={(event) => setChosen(Number(event.currentTarget.value))} />
          <button type="button" class="quiet" aria-label="one step on" onClick={() => setChosen(Math.min(last, step + 1))}>▶</button>
          <output>step {step + 1} of {last + 1}</output>
        </div>
      )}
      <p class="picked-text" aria-live="polite">{picked ? <><b>{textOf(picked) || "…"}</b>{` · sum ${fixed(picked.score)} · normalised ${fixed(picked.normalized)} · this token ${percent(Math.exp(picked.logProb))} · ${stateOf(picked)}`}</> : " "}</p>
      {trace?.truncated && <p class="alert">The search went on; its trace ends here, because it would have become too large.</p>}
      {ranked.length > 0 && !trace?.samples && (
        <div class="table">
          <table>
            <caption>After step {step + 1}: what would be answered, by normalised score</caption>
            <thead><tr><th scope="col">text so far</th><th scope="col">state</th><th scope="col">sum</th><th scope="col">length</th>
              <th scope="col">normalised</th><th scope="col">rank</th><th scope="col">by sum alone</th></tr></thead>
            <tbody>{ranked.slice(0, 16).map(({ node, rank, rankBySum }) => (
              <tr key={`${node.step}-${node.place}`} class={node.answer && node.rank === 1 ? "marked" : ""} onMouseEnter={() => setPicked(node)}>
                <td class="text">{textOf(node) || "…"}</td><td>{stateOf(node)}</td><td>{fixed(node.score)}</td><td>{node.step + 1}</td>
                <td>{fixed(node.normalized)}</td><td>{rank}</td>
                <td>{rankBySum}{rank !== rankBySum && <span class={rank < rankBySum ? "up" : "down"}>{rank < rankBySum ? ` ▲ ${rankBySum - rank}` : ` ▼ ${rank - rankBySum}`}</span>}</td>
              </tr>
            ))}</tbody>
          </table>
        </div>
      )}
      {!trace?.samples && ranked.some((each) => each.rank !== each.rankBySum) && (
        <p class="hint">▲ and ▼: what the length penalty ({fixed(tree.penalty, 2)}) moved up or down, beside the bare sum of log-probabilities.</p>
      )}
    </Card>
  );
}

const shorten = (text: string, most: number) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
