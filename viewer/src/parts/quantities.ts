// What the colours of tokens can show, and from which value to which.

import type { Episode } from "../api.ts";
import { number } from "./text.ts";

export interface Quantity {
  key: string;
  name: string;
  of: (episode: Episode, token: number) => number | null;
  missing: (episode: Episode) => string; // why there is nothing, or ""
  middle?: number; // of a scale with two sides
}

const skipped = (episode: Episode) =>
  episode.id.startsWith("eval") ? "The learner does not use evaluations." : "The learner skipped this episode: its advantages are all 0.";
const gap = (episode: Episode, token: number) => {
  const [engine, learner] = [episode.engine[token], episode.learner?.[token]];
  return typeof engine === "number" && typeof learner === "number" ? learner - engine : null;
};
const ratio = (episode: Episode, token: number) => {
  const nats = gap(episode, token);
  return nats === null ? null : Math.exp(nats);
};
const noEngine = (episode: Episode) => (episode.engine.every((value) => value === null) ? "The engine gave no log-probabilities." : "");
const noLearner = (episode: Episode) => (episode.learner ? "" : skipped(episode));

export const QUANTITIES: Quantity[] = [
  { key: "engine", name: "log-probability, engine", of: (episode, token) => episode.engine[token] ?? null, missing: noEngine },
  { key: "learner", name: "log-probability, learner", of: (episode, token) => episode.learner?.[token] ?? null, missing: noLearner },
  { key: "gap", name: "gap, learner − engine", of: gap, missing: noLearner, middle: 0 },
  { key: "ratio", name: "ratio, learner / engine", of: ratio, missing: noLearner, middle: 1 },
  {
    key: "advantage",
    name: "advantage",
    of: (episode, token) => episode.advantages?.[token] ?? null,
    missing: (episode) => (episode.advantages ? "" : skipped(episode)),
    middle: 0,
  },
  {
    key: "entropy",
    name: "entropy",
    of: (episode, token) => episode.entropies?.[token] ?? null,
    missing: (episode) => (episode.entropies ? "" : episode.learner ? "The run did not keep entropies." : skipped(episode)),
  },
  {
    key: "value",
    name: "value",
    of: (episode, token) => episode.values?.[token] ?? null,
    missing: (episode) => (episode.values ? "" : "There is no critic."),
  },
];

export interface Scale {
  ends: string[]; // from the palest or lowest to the fullest or highest
  middle: boolean;
  tint: (value: number) => { side: "low" | "high"; share: number };
}

const AGREES = 0.01; // nats between engine and learner: what is less stays pale

/** Few tokens are extreme: the scale ends where 2 % of them lie beyond. */
export function scaleOf(quantity: Quantity, episode: Episode): Scale | null {
  const values = episode.tokens.flatMap((_, token) => (episode.sampled[token] ? (quantity.of(episode, token) ?? []) : [])).sort((a, b) => a - b);
  if (!values.length) return null;
  const at = (share: number) => values[Math.round(share * (values.length - 1))]!;
  const within = (share: number) => Math.max(0, Math.min(1, share));
  const { key, middle } = quantity;
  if (middle !== undefined) {
    const move = (value: number) => (middle === 1 ? Math.log(value) : value); // ratios of 2 and 1/2 are equally far from 1
    const back = (value: number) => (middle === 1 ? Math.exp(value) : value);
    const far = Math.max(-move(at(0.02)), move(at(0.98)), key === "advantage" ? 1e-9 : AGREES);
    return {
      ends: [back(-far), middle, back(far)].map((value) => number(value, 3)),
      middle: true,
      tint: (value) => ({ side: value < middle ? "low" : "high", share: within(Math.abs(move(value)) / far) }),
    };
  }
  const low = key === "engine" || key === "learner";
  const [pale, full] = low ? [0, at(0.02)] : key === "entropy" ? [0, at(0.98)] : [at(0.02), at(0.98)];
  return {
    ends: [number(pale, 3), number(full, 3)],
    middle: false,
    tint: (value) => ({ side: low ? "low" : "high", share: within((value - pale) / (full - pale || 1)) }),
  };
}
