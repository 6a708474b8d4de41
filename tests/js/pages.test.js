// Page functions that need no browser: selection state, order of files, plan texts, submission body.

import assert from "node:assert/strict";
import test from "node:test";

globalThis.setInterval = () => {}; // times.js updates durations every second, which would keep this process running
globalThis.document = { documentElement: { lang: "en" }, querySelectorAll: () => [], addEventListener: () => {} };

const { sortFiles } = await import("../../static/sluice/file-browser.js");
const { selectAllState } = await import("../../static/sluice/selection.js");
const { formatCost, formatStart } = await import("../../static/sluice/submit-sidebar.js");
const { buildSubmission } = await import("../../static/sluice/submit-dialogs.js");

test("select-all is checked only if all rows are selected", () => {
  assert.deepEqual(selectAllState(0, 0), { checked: false, indeterminate: false });
  assert.deepEqual(selectAllState(1, 3), { checked: false, indeterminate: true });
  assert.deepEqual(selectAllState(3, 3), { checked: true, indeterminate: false });
});

test("directories are listed before files, each sorted by name", () => {
  const files = [["b.log", "file"], ["z", "dir"], ["a.log", "file"], ["latest", "link"], ["data", "dir"]].map(([name, kind]) => ({ name, kind }));
  assert.deepEqual(sortFiles(files).map((file) => file.name), ["data", "z", "a.log", "b.log", "latest"]);
});

test("start and cost of a plan as text", () => {
  assert.equal(formatStart({ startsNow: true }), "now");
  assert.equal(formatStart({ startsNow: false, expectedStart: null }), "when resources are free");
  assert.match(formatStart({ startsNow: false, expectedStart: "2030-01-31T18:00:00Z" }), /^by /);
  assert.equal(formatCost({ machineHours: 1.23456, gpuHours: 0, nodeHours: 1 }), "1.23 machine hours");
  assert.equal(formatCost({ machineHours: 8, gpuHours: 2, nodeHours: 1 }), "8 machine hours · 2 GPU hours");
  assert.equal(formatCost({ machineHours: null, gpuHours: 2, nodeHours: 1 }), "1 node hours, no price · 2 GPU hours");
  assert.equal(formatCost({ machineHours: null, gpuHours: null, nodeHours: null }), "–");
});

test("a submission has secrets, code and origin only if there are any", () => {
  const state = { document: { jobName: "a" }, secrets: { OLD: "x" }, imageLogins: {}, clonedFrom: "" };
  assert.deepEqual(buildSubmission(state, ""), { job: { jobName: "a" } });
  const full = { document: { secrets: ["KEY", "EMPTY"] }, secrets: { KEY: "v", OLD: "x" }, imageLogins: { i: {} }, clonedFrom: "id" };
  assert.deepEqual(buildSubmission(full, "abc"), { job: full.document, secrets: { KEY: "v", EMPTY: "" }, code: "abc", image_logins: { i: {} }, cloned_from: "id" });
});
