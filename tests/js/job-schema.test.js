import assert from "node:assert/strict";
import test from "node:test";

import { listCompletions, findJsonKeys, findSchemaAt, findYamlKeys } from "../../static/sluice/job-schema.js";

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
  return listCompletions(SCHEMA, { lines, line: lines.at(-1), prefix, isJson }).map((each) => each.value);
};

test("findSchemaAt follows references, lists and nullable sections", () => {
  assert.ok(findSchemaAt(SCHEMA, ["taskRoles"]).properties.placement);
  assert.ok(findSchemaAt(SCHEMA, ["metrics"]).properties.type);
  assert.equal(findSchemaAt(SCHEMA, ["unknown"]), null);
});

test("enclosing keys of YAML follow the indentation", () => {
  assert.deepEqual(findYamlKeys(["taskRoles:", "- name: a", "  "], 2, 2), ["taskRoles"]);
  assert.deepEqual(findYamlKeys(["jobName: a", ""], 1, 0), []);
});

test("enclosing keys of JSON follow the brackets", () => {
  assert.deepEqual(findJsonKeys('{"a": 1, "taskRoles": [{"name": "x", '), ["taskRoles"]);
  assert.deepEqual(findJsonKeys('{"metrics": {"type": "t"}, '), []);
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
