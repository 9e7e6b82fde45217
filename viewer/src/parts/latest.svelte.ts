/** The newest answer to a question that may change; the one before stays until it is there. */
export class Latest<T> {
  value: T | null = $state.raw(null);
  error = $state("");
  #asked = 0;
  #shown = 0;

  /** `read` gives null where there is nothing to ask for. */
  constructor(read: () => Promise<T> | null) {
    $effect(() => {
      const number = ++this.#asked;
      // Not only the answer to the last question counts: of a run that changes faster than it is read, there would be none.
      const show = (value: T | null, error: string) => {
        if (number < this.#shown) return;
        [this.#shown, this.value, this.error] = [number, value, error];
      };
      const asked = read();
      if (!asked) show(null, "");
      asked?.then(
        (answer) => show(answer, ""),
        (error: Error) => show(null, error.message),
      );
    });
  }
}
