// Where answers come from: the server, or what the file holds.
import { embedded } from "view/embedded";

export const inFile = embedded !== null;

export const ask = async (path, parameters = {}) => {
  const given = Object.fromEntries(Object.entries(parameters).filter(([, v]) => v !== undefined && v !== null && v !== ""));
  if (embedded) return embedded.answer(path, given);
  let response;
  try {
    response = await fetch(`/api/${path}?${new URLSearchParams(given)}`, { signal: AbortSignal.timeout(150000) });
  } catch (error) {
    throw new Error(error.name === "TimeoutError" ? "no answer in time" : "mua view does not answer; is it still running?");
  }
  if (response.status === 401) throw new Error("open the address that mua view printed, with its key");
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `status ${response.status}`);
  return body;
};
