import assert from "node:assert/strict";
import test from "node:test";

import { formatValue, parsePath, parseValue, randomKey, readValue, uniqueRoleName, writeValue } from "../../static/sluice/job-document.js";

test("paths are split into keys and indexes", () => {
  assert.deepEqual(parsePath("taskRoles[1].portList[0].beginAt"), ["taskRoles", 1, "portList", 0, "beginAt"]);
  assert.deepEqual(parsePath(""), []);
});

test("read returns undefined for a missing path", () => {
  const job = { taskRoles: [{ name: "main" }], image: null };
  assert.equal(readValue(job, "taskRoles[0].name"), "main");
  assert.equal(readValue(job, "taskRoles[3].name"), undefined);
  assert.equal(readValue(job, "image.name"), undefined);
});

test("write creates missing parents", () => {
  const job = {};
  writeValue(job, "alerts.event[0].receiver", ["a"]);
  assert.deepEqual(job, { alerts: { event: [{ receiver: ["a"] }] } });
});

test("writing undefined removes the value and empty mappings, not lists", () => {
  const job = { jobEnvs: { A: "1" }, taskRoles: [{ env: { B: "2" } }] };
  writeValue(job, "jobEnvs.A", undefined);
  writeValue(job, "taskRoles[0].env.B", undefined);
  assert.deepEqual(job, { taskRoles: [{}] });
  writeValue(job, "labels.x", undefined);
  assert.deepEqual(job, { taskRoles: [{}] });
});

test("numbers are parsed, other text stays unchanged for the check", () => {
  assert.equal(parseValue("int", " 4 "), 4);
  assert.equal(parseValue("int", "-1"), -1);
  assert.equal(parseValue("int", "many"), "many");
  assert.equal(parseValue("int", ""), "");
  assert.equal(parseValue("nullint", ""), null);
  assert.equal(parseValue("float", "1.5"), 1.5);
  assert.equal(parseValue("float", "x"), "x");
  assert.equal(parseValue("memory", "4 GB"), 4096);
  assert.equal(parseValue("memory", "500"), 500);
  assert.equal(parseValue("memory", "0"), 0);
  assert.equal(parseValue("memory", "much"), "much");
  assert.equal(parseValue("memory", ""), "");
});

test("empty optional values and default choices are left out", () => {
  assert.equal(parseValue("text", "  "), undefined);
  assert.equal(parseValue("text", "", { required: true }), "");
  assert.equal(parseValue("select", "auto", { defaultValue: "auto" }), undefined);
  assert.equal(parseValue("select", "pack", { defaultValue: "auto" }), "pack");
  assert.deepEqual(parseValue("list", "a, b;c,"), ["a", "b", "c"]);
});

test("values are formatted for their control", () => {
  assert.equal(formatValue("duration", 5400), "1h30m");
  assert.equal(formatValue("list", ["a", "b"]), "a, b");
  assert.equal(formatValue("text", null), "");
  assert.equal(formatValue("int", 0), "0");
  assert.equal(formatValue("memory", 2048), "2 GB");
  assert.equal(formatValue("text", { x: 1 }), '{"x":1}');
});

test("role names are made unique", () => {
  const job = { taskRoles: [{ name: "worker" }, { name: "worker2" }] };
  assert.equal(uniqueRoleName(job, "worker"), "worker3");
  assert.equal(uniqueRoleName(job, "ps"), "ps");
  assert.equal(uniqueRoleName({ taskRoles: "broken" }, "ps"), "ps");
});

test("idempotency keys are 32 random hex digits", () => {
  assert.match(randomKey(), /^[0-9a-f]{32}$/);
  assert.notEqual(randomKey(), randomKey());
});
