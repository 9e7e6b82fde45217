// Where the page is: `#/VIEW/RUN?key=value`. Everything that a view shows is in it, so that a link reopens it.

export const VIEWS = ["curves", "episodes", "groups", "evaluation", "sight", "preferences", "system"] as const;
export type View = (typeof VIEWS)[number];

interface Place {
  view: View | "runs";
  run: string; // id; "" in the list of runs
  query: Record<string, string>;
}

function read(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", run = ""] = path.split("/");
  const known = VIEWS.find((one) => one === view);
  const found = Object.fromEntries(new URLSearchParams(query));
  return known && run ? { view: known, run: decodeURIComponent(run), query: found } : { view: "runs", run: "", query: found };
}

export const place = $state(read());
addEventListener("hashchange", () => Object.assign(place, read()));

export function link(view: Place["view"], run = "", query: Record<string, string | undefined> = {}): string {
  const set = Object.entries(query).filter((entry): entry is [string, string] => !!entry[1]);
  const path = view === "runs" ? "" : `${view}/${encodeURIComponent(run)}`;
  return `#/${path}${set.length ? `?${new URLSearchParams(set)}` : ""}`;
}

/** Change some keys of the query; an empty value removes its key. */
export function ask(changes: Record<string, string>): void {
  const next = link(place.view, place.run, { ...place.query, ...changes });
  history.replaceState(null, "", next);
  Object.assign(place, read());
}
