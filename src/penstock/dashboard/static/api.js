// The engine's HTTP API, with the browser's session: the same that every other client uses.

export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail ?? problem.title ?? `the engine answered ${status}`);
    this.status = status;
    this.code = problem.code ?? "";
    this.hint = problem.hint ?? "";
    this.field = problem.field ?? "";
  }
}

let csrf = "";
let onSignedOut = () => {};

/** What to do when the session has ended. */
export function whenSignedOut(act) {
  onSignedOut = act;
}

export function useToken(token) {
  csrf = token ?? "";
}

/** What everything that is not a GET has to send in the header X-CSRF-Token. */
export const csrfToken = () => csrf;

/** "/v1/jobs" with query parameters; a list is given several times, what is empty not at all. */
export function url(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "" && one !== false) query.append(name, one);
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** An id as one part of a path. */
export const part = encodeURIComponent;

export async function send(method, path, body, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  if (method !== "GET") headers["X-CSRF-Token"] = csrf;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: options.signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { detail: "the engine can't be reached" });
  }
  if (!response.ok) throw await failure(response, options);
  return response;
}

export async function failure(response, options = {}) {
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401 && !options.signingIn) onSignedOut();
  return new ApiError(response.status, problem.error?.message ? { detail: problem.error.message } : problem);
}

export async function get(path, params, options) {
  return (await send("GET", url(path, params), undefined, options)).json();
}

/** The same, or `otherwise` if there is none or the key may not see it. */
export async function getOr(otherwise, path, params) {
  try {
    return await get(path, params);
  } catch (error) {
    if (error instanceof ApiError && [403, 404, 409, 410].includes(error.status)) return otherwise;
    throw error;
  }
}

export async function post(path, body, options) {
  const response = await send("POST", path, body ?? {}, options);
  return response.status === 204 ? null : response.json();
}

export async function put(path, body) {
  return (await send("PUT", path, body)).json();
}

export async function del(path) {
  const response = await send("DELETE", path);
  return response.status === 204 ? null : response.json();
}

const MOST = 256 * 1024;

/** The beginning of a payload: {text, type, size, cut}, or {bytes} for an image. */
export async function payload(path, most = MOST) {
  const response = await send("GET", path, undefined, {
    headers: { Accept: "*/*", Range: `bytes=0-${most - 1}` },
  });
  if (response.status === 204) return null;
  const type = response.headers.get("content-type") ?? "";
  const range = /\/(\d+)$/.exec(response.headers.get("content-range") ?? "");
  const data = await response.arrayBuffer();
  const size = range ? Number(range[1]) : data.byteLength;
  return { type, size, cut: size > data.byteLength, text: decode(data), path };
}

function decode(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    // A character that was cut in two at the end is no sign of binary data.
    const text = new TextDecoder().decode(data);
    return text.slice(0, -1).includes("\ufffd") ? null : text;
  }
}

/** The payload behind a pointer of a job; small ones are in the pointer itself. */
export async function pointed(pointer, most = MOST) {
  if (!pointer) return null;
  const found = /^data:([^,;]*(?:;[^,;=]+=[^,;]*)*)(;base64)?,(.*)$/s.exec(pointer);
  const path = `/v1/blobs/${part(pointer)}`;
  if (!found) {
    return pointer.startsWith("blob:") ? payload(path, most) : { type: "", size: 0, text: pointer, foreign: true };
  }
  const raw = found[2] ? atob(found[3]) : unescape(found[3]);
  const data = Uint8Array.from(raw, (char) => char.charCodeAt(0));
  return { type: found[1] || "text/plain", size: data.length, cut: false, text: decode(data), path };
}
