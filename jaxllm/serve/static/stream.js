// Server-sent events of a POST, which EventSource cannot make.

/** The message of an answer that is not a stream. */
async function messageOf(response) {
  const text = await response.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch {
    // Not JSON: a proxy's page, say. Its text is all there is.
  }
  return `${response.status} ${response.statusText}: ${String(message).slice(0, 500)}`;
}

/** The data of an event's lines; "" for a comment. */
function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}

/**
 * POST, and give each event's JSON as it comes, up to [DONE].
 * Throws an Error with the server's message if it refuses, and an AbortError if `signal` says so.
 */
export async function* openStream(url, { headers, body, signal }) {
  let response;
  try {
    response = await fetch(url, { method: "POST", headers, body, signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Error("The server does not answer.");
  }
  if (!response.ok) throw new Error(await messageOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      // Events end with a blank line, and may be cut anywhere, between \r and \n too.
      rest = (rest + value).replaceAll("\r\n", "\n");
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = dataOf(event);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } catch (error) {
    if (signal.aborted || !(error instanceof TypeError)) throw error;
    throw new Error("The connection to the server broke.");
  } finally {
    // So that the server learns at once when nobody reads on.
    reader.cancel().catch(() => undefined);
  }
}
