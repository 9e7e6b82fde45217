/** The newest answer to a question that may change; the one before stays until it is there. */
export class Latest<T> {
  value: T | null = $state.raw(null);
  error = $state("");

  /** `read` gives null where there is nothing to ask for. */
  constructor(read: () => Promise<T> | null) {
    $effect(() => {
      let old = false;
      const asked = read();
      if (!asked) {
        this.value = null;
        this.error = "";
      }
      asked?.then(
        (answer) => {
          if (old) return;
          this.value = answer;
          this.error = "";
        },
        (error: Error) => {
          if (old) return;
          this.value = null;
          this.error = error.message;
        },
      );
      return () => {
        old = true;
      };
    });
  }
}
