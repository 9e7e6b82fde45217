// What the pairs of a preference run say. A label is 0 (the first is better), 1 (the second), -1 (neither).

import type { Pairs } from "../api.ts";

export interface Pair {
  id: string;
  session: number;
  step: number;
  label: number;
  answers: number[];
  probabilities: [number, number, number] | null;
  chosen: number | null; // probability of the side that the label names
  difference: number | null; // of the true returns: second less first
  learned: number | null; // likewise, of the returns by the reward model
  truths: Pairs["truth"][number];
  returns: Pairs["learned"][number];
  right: boolean | null; // null: undecided, or nobody knows
  disagree: boolean; // the orders do
  position: number; // the place, 0 or 1, that both orders named whatever lay there; -1: none
  text: string;
  error: string;
  first: string[];
  second: string[];
}

const less = ([first, second]: Pairs["truth"][number]) => (first === null || second === null ? null : second - first);

export function pairsOf(all: Pairs): Pair[] {
  return all.id.map((id, row) => {
    const [label, answers, probabilities] = [all.label[row]!, all.answers[row]!, all.probabilities[row]!];
    const [truths, returns] = [all.truth[row]!, all.learned[row]!];
    const difference = less(truths);
    const [one, two] = answers;
    return {
      id,
      session: all.session[row]!,
      step: all.step[row]!,
      label,
      answers,
      probabilities,
      chosen: label >= 0 && probabilities ? probabilities[label]! : null,
      difference,
      learned: less(returns),
      truths,
      returns,
      right: label < 0 || !difference ? null : difference > 0 === (label === 1),
      disagree: answers.length > 1 && one !== two,
      // Answers are about the pair as it is; in the second order the pictures lay the other way round.
      position: answers.length > 1 && one! >= 0 && two === 1 - one! ? one! : -1,
      text: all.text[row]!,
      error: all.error[row]!,
      first: all.first[row]!,
      second: all.second[row]!,
    };
  });
}

export const tally = <T>(all: T[], test: (one: T) => unknown): number => all.filter(test).length;

/** Equal bins between `from` and `to`. */
export function binned<T>(all: T[], value: (one: T) => number, [from, to]: [number, number], bins = 10): { edges: number[]; groups: T[][] } {
  const groups: T[][] = Array.from({ length: bins }, () => []);
  for (const one of all) groups[Math.min(bins - 1, Math.max(0, Math.floor((bins * (value(one) - from)) / (to - from || 1))))]!.push(one);
  return { edges: Array.from({ length: bins + 1 }, (_, edge) => from + ((to - from) * edge) / bins), groups };
}
