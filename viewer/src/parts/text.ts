// Text of a run as the page shows it. A policy can write anything, so nothing invisible passes.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** The text with control and direction characters written out, as in ⟨U+202E⟩. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (character) => `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A token with its whitespace as marks; lines may break before a space. */
export function marked(token: string): string {
  return visible(token).replaceAll(" ", "\u200b·").replaceAll("\t", "⇥").replaceAll("\n", "↵\n");
}

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return String(Number(value.toPrecision(digits))).replaceAll("-", "−");
}

export function percent(share: number): string {
  return Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–";
}

export function count(n: number, one: string, many = `${one}s`): string {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

export function verdict(correct: boolean | null | undefined): string {
  return correct === true ? "✓ right" : correct === false ? "✗ wrong" : "";
}

/** A value of `info` or of a tool call. */
export function written(value: unknown): string {
  return visible(typeof value === "string" ? value : (JSON.stringify(value) ?? String(value)));
}
