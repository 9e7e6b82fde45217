// Times and settings as text, and the statistics that several views share.

import type { RunLine } from "../api.ts";
import { number } from "./text.ts";

export type Num = number | null;

export function duration(seconds: Num | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${number(seconds, 2)} s`;
  return seconds < 6000 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function ago(time: number): string {
  const minutes = Math.max(0, Date.now() / 1000 - time) / 60;
  if (minutes < 1) return "just now";
  if (minutes < 90) return `${Math.round(minutes)} min ago`;
  return minutes < 2880 ? `${Math.round(minutes / 60)} h ago` : `${Math.round(minutes / 1440)} days ago`;
}

/** A setting comes as JSON; text reads better without its quotes. */
export const plain = (json: string | undefined): string => (json ?? "").replace(/^"(.*)"$/s, "$1");

/** The name of a run, with its id where others have the same name. */
export const title = (run: RunLine, runs: RunLine[]): string =>
  runs.some((other) => other.name === run.name && other.id !== run.id) ? `${run.name} (${run.id})` : run.name;

/** What the column "iteration" counts. */
export const unit = (run: RunLine): string => (run.kind === "preference" ? "environment step" : "iteration");

/** Wilson's 95 % interval of a share. */
export function wilson(hits: number, of: number): [number, number] {
  if (!of) return [0, 1];
  const share = hits / of;
  const z2 = 1.96 ** 2;
  const centre = (share + z2 / (2 * of)) / (1 + z2 / of);
  const half = (1.96 * Math.sqrt((share * (1 - share)) / of + z2 / (4 * of * of))) / (1 + z2 / of);
  return [centre - half, centre + half];
}

/** Exponential moving average without the bias of its beginning; gaps stay gaps. */
export function ema(values: Num[], weight: number): Num[] {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}
