import assert from "node:assert/strict";
import test from "node:test";

import { completions, jsonKeys, schemaAt, yamlKeys } from "../../static/sluice/job-schema.js";

const SCHEMA = {
  properties: {
    jobName: { type: "string", description: "Name of the job." },
    taskRoles: { type: "array", items: { $ref: "#/$defs/Role" } },
    metrics: { anyOf: [{ $ref: "#/$defs/Metrics" }, { type: "null" }] },
  },
  $defs: {
    Role: { properties: { name: { type: "string" }, placement: { enum: ["auto", "pack"] }, isMain: { type: "boolean" } } },
    Metrics: { properties: { type: { type: "string" } } },
  },
};

const complete = (text, prefix = "", isJson = false) => {
  const lines = text.split("\n");
  return completions(SCHEMA, { lines, line: lines.at(-1), prefix, isJson }).map((each) => each.value);
};

test("schemaAt follows references, lists and nullable sections", () => {
  assert.ok(schemaAt(SCHEMA, ["taskRoles"]).properties.placement);
  assert.ok(schemaAt(SCHEMA, ["metrics"]).properties.type);
  assert.equal(schemaAt(SCHEMA, ["unknown"]), null);
});

test("enclosing keys of YAML follow the indentation", () => {
  assert.deepEqual(yamlKeys(["taskRoles:", "- name: a", "  "], 2, 2), ["taskRoles"]);
  assert.deepEqual(yamlKeys(["jobName: a", ""], 1, 0), []);
});

test("enclosing keys of JSON follow the brackets", () => {
  assert.deepEqual(jsonKeys('{"a": 1, "taskRoles": [{"name": "x", '), ["taskRoles"]);
  assert.deepEqual(jsonKeys('{"metrics": {"type": "t"}, '), []);
});

test("fields are completed at their level", () => {
  assert.deepEqual(complete("jo", "jo"), ["jobName: ", "taskRoles: ", "metrics: "]);
  assert.deepEqual(complete("taskRoles:\n- name: a\n  pl", "pl"), ["name: ", "placement: ", "isMain: "]);
  assert.deepEqual(complete('{"taskRoles": [{"', "", true), ["name", "placement", "isMain"]);
});

test("values are completed after a key", () => {
  assert.deepEqual(complete("taskRoles:\n- name: a\n  placement: "), ["auto", "pack"]);
  assert.deepEqual(complete("taskRoles:\n- name: a\n  isMain: "), ["true", "false"]);
});
