// Evaluations: greedy answers by item, and how sure their accuracy is.

import type { Episodes } from "../api.ts";

type View = Episodes["view"][number];

export const itemOf = (episodes: Episodes, row: number) => `${episodes.env[row]}\n${episodes.variant[row]}\n${episodes.index[row]}`;

/** Item → row of its greedy answer, with a verdict, of one evaluation. */
export function answersAt(episodes: Episodes, iteration: number, view: View): Map<string, number> {
  const rows = new Map<string, number>();
  episodes.id.forEach((_, row) => {
    const of = episodes.kind[row] === "eval" && episodes.sample[row] === "greedy" && episodes.view[row] === view && episodes.iteration[row] === iteration;
    if (of && episodes.correct[row] !== null) rows.set(itemOf(episodes, row), row);
  });
  return rows;
}

/** Iterations with evaluations of these views, oldest first. */
export function evaluationsOf(episodes: Episodes, views: View[]): number[] {
  const found = episodes.iteration.filter((_, row) => episodes.kind[row] === "eval" && episodes.sample[row] === "greedy" && views.includes(episodes.view[row]!));
  return [...new Set(found)].sort((a, b) => a - b);
}

const Z = 1.959964; // 95 %

/** Wilson's interval of a share. */
export function wilson(right: number, n: number): [number, number] {
  const share = right / n;
  const middle = share + (Z * Z) / (2 * n);
  const half = Z * Math.sqrt((share * (1 - share)) / n + (Z * Z) / (4 * n * n));
  const scale = 1 + (Z * Z) / n;
  return [Math.max(0, (middle - half) / scale), Math.min(1, (middle + half) / scale)];
}

/** The interval of the mean of differences of pairs. */
export function gapInterval(gaps: number[]): [number, number] {
  const n = gaps.length;
  const mean = gaps.reduce((sum, one) => sum + one, 0) / n;
  const half = Z * Math.sqrt(gaps.reduce((sum, one) => sum + (one - mean) ** 2, 0) / Math.max(1, n - 1) / n);
  return [mean - half, mean + half];
}
