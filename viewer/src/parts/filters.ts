// Which episodes are shown, and in which order: row numbers into the columns, as there may be 10,000.

import type { Episodes } from "../api.ts";

type Query = Record<string, string>;
type Test = (row: number) => boolean;

export const ORDERS = {
  "": "newest",
  high: "reward, high to low",
  low: "reward, low to high",
  advantage: "size of the advantage",
  length: "length",
  turns: "turns",
};

/** Keys of the URL that choose episodes; the others say how they are shown. */
export const FILTERS = "kind from to newest least most correct turns tools status env stage replica text".split(" ");

const EQUAL = { kind: "kind", status: "status", env: "env", stage: "stage", turns: "turns" } as const;

/** `found`: ids that the text search gave; null: there is no search. */
export function choose(episodes: Episodes, query: Query, found: Set<string> | null): number[] {
  const tests: Test[] = [];
  for (const [key, name] of Object.entries(EQUAL)) {
    const wanted = query[key];
    if (wanted) tests.push((row) => String(episodes[name][row]) === wanted);
  }
  if (query.newest) {
    const newest = episodes.iteration.reduce((most, one, row) => (!query.kind || episodes.kind[row] === query.kind ? Math.max(most, one) : most), 0);
    tests.push((row) => episodes.iteration[row] === newest);
  }
  const between = (column: number[], from?: string, to?: string) => {
    if (from) tests.push((row) => column[row]! >= Number(from));
    if (to) tests.push((row) => column[row]! <= Number(to));
  };
  between(episodes.iteration, query.from, query.to);
  between(episodes.reward, query.least, query.most);
  if (query.correct) tests.push((row) => episodes.correct[row] === (query.correct === "yes"));
  if (query.tools) tests.push((row) => (episodes.tools[row] ?? 0) > 0 === (query.tools === "some"));
  if (query.replica) tests.push((row) => episodes.replicas[row]!.split(", ").includes(query.replica!));
  if (found) tests.push((row) => found.has(episodes.id[row]!));

  const rows: number[] = [];
  for (let row = episodes.id.length - 1; row >= 0; row--) if (tests.every((test) => test(row))) rows.push(row);
  return sort(episodes, rows, query.sort ?? "");
}

function sort(episodes: Episodes, rows: number[], order: string): number[] {
  const by = (value: (row: number) => number) => rows.sort((a, b) => value(b) - value(a));
  if (order === "high") return by((row) => episodes.reward[row]!);
  if (order === "low") return by((row) => -episodes.reward[row]!);
  if (order === "advantage") return by((row) => Math.abs(episodes.advantage[row] ?? 0));
  if (order === "length") return by((row) => episodes.tokens[row]!);
  if (order === "turns") return by((row) => episodes.turns[row]!);
  return rows;
}

/** The search of a report, which holds no server: questions and answers as far as the index has them. */
export function searchIndex(episodes: Episodes, text: string): Set<string> {
  const wanted = text.toLowerCase();
  return new Set(episodes.id.filter((_, row) => `${episodes.question[row]}\n${episodes.answer[row]}`.toLowerCase().includes(wanted)));
}

export function distinct<T extends string | number>(column: readonly T[]): T[] {
  return [...new Set(column)].sort((a, b) => (typeof a === "number" ? a - Number(b) : String(a).localeCompare(String(b))));
}

export interface Bin {
  from: number;
  to: number;
  count: number;
}

/** A bin per value where these are few, and equal ones otherwise. */
export function histogram(values: number[], most = 16): Bin[] {
  const set = new Set(values);
  if (set.size <= most) {
    const counts = new Map<number, number>();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    return distinct([...set]).map((value) => ({ from: value, to: value, count: counts.get(value)! }));
  }
  const low = values.reduce((a, b) => Math.min(a, b));
  const wide = (values.reduce((a, b) => Math.max(a, b)) - low) / most;
  const bins = Array.from({ length: most }, (_, k) => ({ from: low + k * wide, to: low + (k + 1) * wide, count: 0 }));
  for (const value of values) bins[Math.min(most - 1, Math.floor((value - low) / wide))]!.count++;
  return bins;
}
