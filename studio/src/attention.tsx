// The heat map of source and target, as in the first papers on attention.
import { useRef, useState } from "preact/hooks";
import type { Hypothesis, Token } from "./api.ts";
import { label } from "./pieces.ts";
import { Card, Downloads } from "./ui.tsx";

export function Attention({ source, what, hypothesis, hovered }: { source: Token[]; what: string; hypothesis: Hypothesis; hovered: number[] }) {
  const [fixedRow, setFixed] = useState<number | null>(null);
  const [pointed, setPointed] = useState<{ row: number; column: number } | null>(null);
  const svg = useRef<SVGSVGElement>(null);
  const rows = hypothesis.alignment ?? [];
  const target = hypothesis.tokens ?? [];
  const size = Math.max(16, Math.min(38, Math.floor(420 / Math.max(rows.length, source.length, 1))));
  const left = 104, top = 92;
  const width = left + source.length * size + 46, height = top + rows.length * size + 8;
  const row = pointed?.row ?? fixedRow;
  const strong = (index: number) => (row !== null ? row === index : hovered.includes(index));
  const said = pointed ? { ...pointed, value: rows[pointed.row]?.weights[pointed.column] ?? 0 } : null;
  return (
    <Card id="attention" title="Attention" hint={`How much each target token (a row) looked at each ${what} (a column). A click holds a row.`}
      tools={<Downloads svg={() => svg.current} name="attention" />}>
      <div class="scroll" tabIndex={0} role="group" aria-label="The heat map">
        <svg ref={svg} class="heat" viewBox={`0 0 ${width} ${height}`} width={width} height={height} role="img"
          aria-label={`Attention of ${rows.length} target tokens over ${source.length} ${what}s`} onMouseLeave={() => setPointed(null)}>
          {source.map((token, column) => (
            <text key={`s${column}`} class={row !== null && top_of(rows[row]?.weights, column) ? "strong" : ""}
              transform={`translate(${left + column * size + size / 2 + 3} ${top - 7}) rotate(-50)`}>{label(token.piece, column === 0)}</text>
          ))}
          {rows.map((each, index) => (
            <g key={`r${index}`} data-row={index} class={strong(index) ? "row strong" : row !== null ? "row weak" : "row"}
              onClick={() => setFixed(fixedRow === index ? null : index)}>
              <text x={left - 8} y={top + index * size + size / 2 + 4} text-anchor="end" tabIndex={0} role="button" aria-pressed={fixedRow === index}
                aria-label={`${label(target[index]?.piece, index === 0)}: ${spoken(each.weights, source)}`}
                onKeyDown={(event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); setFixed(fixedRow === index ? null : index); } }}
              >{label(target[index]?.piece, index === 0)}</text>
              {each.weights.map((weight, column) => (
                <rect key={column} class="cell" x={left + column * size} y={top + index * size} width={size - 1} height={size - 1} rx={3}
                  fill-opacity={(0.04 + 0.96 * Math.min(1, weight)).toFixed(3)} data-weight={weight} onMouseEnter={() => setPointed({ row: index, column })} />
              ))}
              {strong(index) && <rect class="frame" x={left - 2} y={top + index * size - 2} width={source.length * size + 3} height={size + 3} rx={5} />}
            </g>
          ))}
        </svg>
      </div>
      <p class="picked-text" aria-live="polite">{said
        ? <><b>{label(target[said.row]?.piece, said.row === 0)}</b> looks at <b>{label(source[said.column]?.piece, said.column === 0)}</b> with {said.value.toFixed(3)}</>
        : row !== null && rows[row] ? <><b>{label(target[row]?.piece, row === 0)}</b>: {spoken(rows[row]!.weights, source)}</> : " "}</p>
    </Card>
  );
}

const top_of = (weights: number[] | undefined, column: number) => !!weights && weights[column]! >= 0.2;

/** The strongest three, in words. */
function spoken(weights: number[], source: Token[]): string {
  return weights.map((weight, index) => ({ weight, index })).sort((a, b) => b.weight - a.weight).slice(0, 3)
    .map(({ weight, index }) => `${label(source[index]?.piece, index === 0)} ${weight.toFixed(2)}`).join(", ");
}
