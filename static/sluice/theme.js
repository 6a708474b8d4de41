// Runs before the first paint: "auto" follows the system, and goes on following it.
(() => {
  const root = document.documentElement;
  if (root.dataset.themeChoice !== "auto") return;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { root.dataset.bsTheme = dark.matches ? "dark" : "light"; };
  apply();
  dark.addEventListener("change", apply);
})();
