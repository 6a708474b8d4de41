// format.js, against the cases that tests/unit/core/test_formatting.py checks for core/formatting.py.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import * as format from "../../static/sluice/format.js";
import { interpolate, ngettext } from "../../static/sluice/i18n.js";

const CASES = JSON.parse(readFileSync(new URL("../formatting_cases.json", import.meta.url)));

for (const [name, cases] of Object.entries(CASES)) {
  test(`${name} formats like the server`, () => {
    for (const [value, text] of cases) assert.equal(format[name](value), text, `${name}(${value})`);
  });
}

test("memoryInput writes MiB as parseMemory reads them, without rounding", () => {
  for (const mib of [64, 500, 1024, 1536, 4000, 4096, 262144]) assert.equal(format.parseMemory(format.memoryInput(mib)), mib);
  assert.equal(format.memoryInput(4096), "4 GB");
  assert.equal(format.memoryInput(4000), "4000 MB");
  assert.equal(format.memoryInput("much"), "much");
  assert.equal(format.memoryInput(undefined), "");
});

test("negative durations are zero", () => {
  assert.equal(format.duration(-5), "0 s");
  assert.equal(format.compactDuration(-5), "0:00");
});

test("durationInput writes seconds as job files accept them", () => {
  assert.equal(format.durationInput(9000), "2h30m");
  assert.equal(format.durationInput(90061), "1d1h1m1s");
  assert.equal(format.durationInput(0), "0s");
  assert.equal(format.durationInput("1-12:00:00"), "1-12:00:00");
  assert.equal(format.durationInput(undefined), "");
});

test("interpolate fills every named parameter", () => {
  assert.equal(interpolate("%(a)s of %(b)s, %(a)s", { a: 1, b: "two" }), "1 of two, 1");
  assert.equal(ngettext("one", "many", 1), "one");
  assert.equal(ngettext("one", "many", 0), "many");
});
