// Metrics by key: a column of progress by its name, one of the evaluations with "eval:" before it.

import type { Run, Table } from "../api.ts";
import type { Num } from "./format.ts";

export interface Line {
  name: string;
  x: number[];
  y: Num[];
  low?: Num[];
  high?: Num[];
  dash?: boolean;
  exact?: boolean; // not to be smoothed
}

const EVAL = "eval:";
export const label = (key: string): string => (key.startsWith(EVAL) ? `${key.slice(EVAL.length)} (evaluation)` : key);

function names(table: Table, prefix: string): string[] {
  const measured = (name: string) => table[name]!.some((value) => value !== null);
  const own = (name: string) => name !== "iteration" && name !== "time" && !/_(low|high)(\/|$)/.test(name);
  return Object.keys(table)
    .filter((name) => own(name) && measured(name))
    .map((name) => prefix + name);
}

export const keys = (run: Run): string[] => [...names(run.progress, ""), ...names(run.evaluations, EVAL)];

export function lineOf(run: Run, key: string, name = label(key)): Line | null {
  const table = key.startsWith(EVAL) ? run.evaluations : run.progress;
  const column = key.startsWith(EVAL) ? key.slice(EVAL.length) : key;
  const y = table[column];
  if (!y) return null;
  const bound = (end: string) => table[column.replace("/", `_${end}/`)] ?? table[`${column}_${end}`];
  return { name, x: table.iteration as number[], y, low: bound("low"), high: bound("high"), exact: table === run.evaluations };
}

/** A line per key, and one per key of `other`, if there is one. Of a single metric the lines have the names of the runs. */
export function linesOf(wanted: string[], run: Run, other?: Run | null, title = (of: Run): string => of.line.name): Line[] {
  const short = (key: string) => key.replace(/^(eval:)?(reward\/part|[^/]+)\//, "");
  const line = (of: Run, key: string) => {
    const name = wanted.length > 1 ? short(key) + (of === run ? "" : ` of ${title(of)}`) : other ? title(of) : label(key);
    const found = lineOf(of, key, name);
    return found ? [{ ...found, dash: of === other }] : [];
  };
  return [run, other].flatMap((of) => (of ? wanted.flatMap((key) => line(of, key)) : []));
}

export const measured = (line: Line): boolean => line.y.some((value) => value !== null);
export const moves = (line: Line): boolean => line.y.some((value) => !!value);
