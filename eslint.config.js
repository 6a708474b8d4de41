// ESLint for our modules in static/sluice and their tests; libraries in static/vendor are not checked.

import js from "@eslint/js";
import globals from "globals";

const rules = {
  ...js.configs.recommended.rules,
  "no-var": "error",
  "prefer-const": "error",
  eqeqeq: "error",
  "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
  "no-implicit-globals": "error",
  "max-lines": ["error", 500],
  "max-lines-per-function": ["error", { max: 60, skipComments: true }],
};

export default [
  { ignores: ["static/vendor/**", "node_modules/**", "var/**", ".venv/**", "staticfiles/**"] },
  { files: ["static/sluice/**/*.js"], languageOptions: { ecmaVersion: 2024, sourceType: "module", globals: globals.browser }, rules },
  { files: ["static/sluice/theme.js"], languageOptions: { sourceType: "script" } },
  { files: ["tests/js/**/*.js", "eslint.config.js"], languageOptions: { ecmaVersion: 2024, sourceType: "module", globals: globals.node }, rules },
];
