// What the page reads: the JSON of `rl-vlm view`, schema 1. A report holds the same answers inside its file.
// Token arrays are as long as `tokens`; a number is null where nothing was sampled or nobody measured it.

export const SCHEMA = 1;

type Num = number | null;
/** Columns of equal length. */
export type Table = Record<string, Num[]>;

/** GET api/v1/runs */
export interface Runs {
  schema: number;
  live: boolean; // false in a report
  runs: RunLine[];
}

export interface RunLine {
  id: string; // stands in URLs and links
  folder: string;
  name: string;
  sweep: string; // the sweep that it is a trial of, or ""
  kind: "policy" | "preference" | "sft";
  algorithm: string;
  environment: string;
  status: string; // "done", "interrupted", "failed"; without a result "running", or "no result" where nothing was written for ten minutes
  error: string; // why it failed
  iterations: number;
  total: Num; // iterations that are planned
  reward: [Num, Num]; // first and last
  accuracy: [Num, Num];
  seconds: Num; // of training
  changed: number; // seconds since 1970
  stamp: string; // changes when a file of the run does
  settings: Record<string, string>; // dotted keys in which the listed runs differ
  findings: { text: string; view: string }[]; // what looks wrong, and the view that shows why
}

/** GET api/v1/runs/{id} */
export interface Run {
  schema: number;
  line: RunLine;
  config: Record<string, string>; // dotted key → value as JSON
  result: Record<string, unknown>;
  progress: Table; // with "iteration"; the names are those of docs/results.md
  evaluations: Table; // with "iteration": accuracy/NAME, accuracy_low/NAME, accuracy_high/NAME, reward/..., pass@k/..., sight/...
  messages: { iteration: Num; text: string }[]; // what the terminal said
  losses: { iteration: number; reason: string; count: number }[]; // groups that were lost
  has: { episodes: number; evaluated: number; pairs: number; films: number; adapter: boolean };
}

/** GET api/v1/runs/{id}/episodes: columns of equal length, one entry per kept episode, oldest first. */
export interface Episodes {
  schema: number;
  id: string[]; // "train-10-3", "eval-10-3": iteration and row
  kind: ("train" | "eval")[];
  iteration: number[];
  group: string[]; // samples of one task share it
  env: string[]; // name in a mixture
  stage: number[];
  index: number[]; // item of the data
  variant: string[]; // of an evaluation
  view: ("true" | "blank" | "swapped")[];
  sample: ("greedy" | "sampled")[];
  category: string[];
  reward: number[];
  advantage: Num[]; // mean over its tokens; null for evaluations
  correct: (boolean | null)[];
  status: string[];
  turns: number[];
  tools: Num[]; // tool calls
  tokens: number[]; // sampled ones
  version: number[]; // oldest policy version
  newest: number[]; // newest policy version
  replicas: string[]; // names, joined by ", "
  picture: string[]; // SHA-256 of the picture behind the last answer, or ""
  pictures: number[]; // how many the policy saw
  question: string[]; // beginning of the first user message
  answer: string[]; // beginning of the last answer
}

/** GET api/v1/runs/{id}/search?text=… : ids of the episodes whose text contains it, whatever its case. */
export interface Found {
  schema: number;
  ids: string[];
}

/** GET api/v1/runs/{id}/episodes/{episode} */
export interface Episode {
  schema: number;
  id: string;
  messages: Message[];
  turns: Turn[]; // one per assistant message that was sampled, in order
  info: Record<string, unknown>;
  error: string;
  tokens: string[]; // the text of each token; "" inside a picture
  sampled: boolean[]; // loss mask
  engine: Num[]; // log-probabilities, nats
  learner: Num[] | null; // of the policy before the update; null: the learner skipped the episode, as its advantages are 0
  advantages: Num[] | null;
  values: Num[] | null; // the critic's, in units of the reward
  entropies: Num[] | null; // nats
  spans: Span[]; // of the pictures, in the order of the messages' pictures
  segments: Segment[]; // where the prompt was written anew; empty where it only grew
}

export interface Segment {
  start: number; // token position
  images: number[]; // the pictures that it shows, counted from 0
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  parts: Part[];
  turn: number | null; // index into turns, of a sampled message
}
export type Part = { text: string } | { thought: string } | { call: Call } | { picture: Picture };
export interface Call {
  name: string;
  arguments: Record<string, unknown>;
  raw: string;
}
export interface Picture {
  sha: string;
  width: number;
  height: number;
  of: { picture: number; box: [number, number, number, number] } | null; // the crop of an earlier picture (index in the episode), box in shares 0..1
}
export interface Turn {
  start: number; // token positions
  stop: number;
  version: number;
  versions: { tokens: number; version: number }[]; // pieces, where the version changed within the turn
  replica: string;
  stopReason: string;
  reward: number;
  parts: { name: string; value: number }[];
  wellFormed: boolean;
}
export interface Span {
  start: number;
  stop: number;
  rows: number; // the grid of its tokens; 0: unknown
  columns: number;
}

/** GET api/v1/runs/{id}/pairs: columns of equal length, oldest first. */
export interface Pairs {
  schema: number;
  id: string[]; // "pair-3-17": session and row
  session: number[];
  step: number[]; // environment step
  label: number[]; // 0 first, 1 second, -1 neither
  answers: number[][]; // of each order it was shown in, in terms of the pair as it is
  probabilities: ([number, number, number] | null)[]; // first, second, neither
  truth: [Num, Num][]; // true returns
  learned: [Num, Num][]; // returns by the reward model as it was when the pair was asked about
  text: string[]; // the labeller's words
  error: string[];
  first: string[][]; // SHA-256 of its pictures, evenly spaced, the last one last; [] without pictures
  second: string[][];
}

/** GET api/v1/runs/{id}/films: GIF files of evaluations, at api/v1/runs/{id}/films/{name}. */
export interface Films {
  schema: number;
  films: { name: string; iteration: number; reward: Num }[];
}

/** GET api/v1/stamps: run id → stamp, to follow runs that go on. */
export interface Stamps {
  schema: number;
  stamps: Record<string, string>;
}

/** A sentence that the page shows where an answer did not come. */
export class ApiError extends Error {}

const report = document.getElementById("report");
// A report holds answers by path, as base64 of gzipped JSON, and files by their places, as data URIs.
const inside: { answers: Record<string, string>; files: Record<string, string> } | null = report?.textContent
  ? JSON.parse(report.textContent)
  : null;
export const isReport = inside !== null;

/** The answer to `path`, such as "runs/quickstart". Throws ApiError. */
export async function get<T>(path: string): Promise<T> {
  if (inside) {
    const packed = inside.answers[path];
    if (packed === undefined) throw new ApiError("The report does not hold this.");
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }
  let response: Response;
  try {
    response = await fetch(`api/v1/${path}`, { headers: { Accept: "application/json" } });
  } catch {
    throw new ApiError("The server does not answer: is `rl-vlm view` still running?");
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(answer?.error?.message ?? `The server answered with status ${response.status}.`);
  if (answer.schema !== SCHEMA) throw new ApiError("This page is older or newer than its server: load it again.");
  return answer;
}

/** The address of a picture or film of a run. */
export function fileUrl(run: string, kind: "images" | "films", name: string): string {
  return inside ? (inside.files[`${run}/${kind}/${name}`] ?? "") : `api/v1/runs/${encodeURIComponent(run)}/${kind}/${encodeURIComponent(name)}`;
}
