// What the node programs share, as cells.py for python.

export const { CLIENT_URL: URL, CLIENT_MODEL: MODEL, CLIENT_KEY: KEY, CLIENT_AGENT_URL: AGENT_URL, CLIENT_PICTURE: PICTURE } = process.env;

export async function cell(feature, run, tries = 3) {
  let error;
  do {
    error = null;
    try {
      await run();
    } catch (caught) {
      console.error(caught);
      error = `${caught?.name}: ${caught?.message}`.slice(0, 600);
    }
  } while (error && --tries > 0);
  console.log("CELL " + JSON.stringify({ feature, error }));
}
