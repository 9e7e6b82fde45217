// Answers of the server, kept until the run that they are about changes.

import { get, isReport, type Runs, type Stamps } from "./api.ts";

const POLL_MS = 1500;

/** Run id → what changes when its files do. */
export const stamps: Record<string, string> = $state({});
export const server = $state({ lost: "" }); // a sentence while it does not answer

const kept = new Map<string, { stamp: string; answer: Promise<unknown> }>();

/** The newest answer about a run. In a `$derived` or an `$effect` it is read again when the run changes. */
export function about<T>(run: string, path = ""): Promise<T> {
  const whole = `runs/${encodeURIComponent(run)}${path && `/${path}`}`;
  const stamp = stamps[run] ?? "";
  const known = kept.get(whole);
  if (known && known.stamp === stamp) return known.answer as Promise<T>;
  const answer = get<T>(whole);
  kept.set(whole, { stamp, answer });
  answer.catch(() => kept.delete(whole));
  return answer;
}

export async function listRuns(): Promise<Runs> {
  const runs = await get<Runs>("runs");
  for (const one of runs.runs) stamps[one.id] = one.stamp;
  return runs;
}

async function poll(): Promise<void> {
  try {
    Object.assign(stamps, (await get<Stamps>("stamps")).stamps);
    server.lost = "";
  } catch (error) {
    server.lost = String((error as Error).message);
  }
  setTimeout(poll, POLL_MS);
}
if (!isReport) setTimeout(poll, POLL_MS);
