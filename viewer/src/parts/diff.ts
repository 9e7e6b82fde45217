/** Pieces of `text`, those that `base` lacks as new: by the longest common subsequence of their words. */
export function differences(base: string, text: string): { text: string; fresh: boolean }[] {
  // The table is quadratic; an answer of more words is compared as far as this.
  const split = (whole: string) => whole.match(/\s+|[^\s]+/g)?.slice(0, 1200) ?? [];
  const a = split(base);
  const b = split(text);
  const wide = b.length + 1;
  const common = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * wide + j] = a[i] === b[j] ? common[(i + 1) * wide + j + 1]! + 1 : Math.max(common[(i + 1) * wide + j]!, common[i * wide + j + 1]!);
    }
  }
  const pieces: { text: string; fresh: boolean }[] = [];
  const put = (word: string, fresh: boolean) => {
    const last = pieces.at(-1);
    if (last?.fresh === fresh) last.text += word;
    else pieces.push({ text: word, fresh });
  };
  let i = 0;
  for (let j = 0; j < b.length; ) {
    if (i < a.length && a[i] === b[j]) {
      put(b[j++]!, false);
      i++;
    } else if (i < a.length && common[(i + 1) * wide + j]! >= common[i * wide + j + 1]!) i++;
    else put(b[j++]!, true);
  }
  return pieces;
}
